"""Tensors whose memory is a file that nobody else sees. The kernel writes them out when memory is short, so that a
state larger than memory can be put together."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path

import torch

from flyball.state_folder import clear_errors

_ARENA_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64


class Scratch:
    """Makes tensors in a file without a name. They stay valid as long as they are referenced."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this
        self._folder = folder
        self._size_bytes = 0
        self._arena: mmap.mmap | None = None
        self._used_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with any content. Raises StorageFull, ConfigurationError."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        size_bytes = count * dtype.itemsize
        if self._arena is None or self._used_bytes + size_bytes > len(self._arena):
            self._arena, self._used_bytes = self._map(max(size_bytes, _ARENA_BYTES)), 0
        offset = self._used_bytes
        self._used_bytes += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return torch.frombuffer(self._arena, dtype=dtype, count=count, offset=offset).view(shape)

    def _map(self, size_bytes: int) -> mmap.mmap:
        size_bytes = -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        begin = self._size_bytes
        with clear_errors(self._folder):  # reserved, since a full disk would be a SIGBUS later
            os.posix_fallocate(self._file.fileno(), begin, size_bytes)
        self._size_bytes += size_bytes
        return mmap.mmap(self._file.fileno(), size_bytes, offset=begin)

    def close(self) -> None:
        self._file.close()
