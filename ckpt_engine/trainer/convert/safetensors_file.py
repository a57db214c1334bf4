"""Write whole tensors to a safetensors file as they come, and read them back to compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from ckpt_engine.format import shard_format
from ckpt_engine.format.shard_format import LENGTH_BYTES, TensorHeader
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.tiers.durable_files import write_durably
from ckpt_engine.trainer.capture.capture_plan import DTYPE_NAMES
from ckpt_engine.trainer.tensor_bytes import bytes_in_place
from flyball.contracts.errors import CorruptShard

_HEADER_STEP_BYTES = 4096
_READ_BYTES = 8 << 20


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
    produced: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write the tensors in the order in which they are produced: that of `tensors`, widest elements first (see
    `in_order`). Complex tensors are stored as pairs. Raises StorageFull, OSError, and what `produced` raises."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        stored_dtype, stored_shape = (dtype.to_real(), (*shape, 2)) if dtype.is_complex else (dtype, shape)
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = TensorHeader(DTYPE_NAMES[stored_dtype], stored_shape, (offset, end))
        offset = end
    encoded = shard_format.join_header(metadata, shard_format.encode_tensors(header))
    capacity = -(-(LENGTH_BYTES + len(encoded)) // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES - LENGTH_BYTES

    def parts() -> Iterator[bytes | memoryview]:
        yield capacity.to_bytes(LENGTH_BYTES, "little")
        yield encoded.ljust(capacity)
        for _, tensor in produced:
            yield bytes_in_place(tensor)

    write_durably(path, parts(), size_bytes=LENGTH_BYTES + capacity + offset, mode=0o644)


def element_bytes(dtype: torch.dtype) -> int:
    """Of what is stored: a complex number is a pair."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def in_order(names: Iterable[str], itemsize: Callable[[str], int]) -> list[str]:
    """Names in the order of a file: wide elements first, so that each tensor is aligned."""
    return sorted(names, key=lambda name: -itemsize(name))


def digests_in(path: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The xxh3-128 of each tensor's bytes in a file. Raises CorruptShard, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source, file_bytes = FileSource(descriptor), os.fstat(descriptor).st_size
        prefix = memoryview(bytearray(LENGTH_BYTES))
        source.read_into(prefix, 0)
        whole = memoryview(bytearray(shard_format.header_bytes(prefix, file_bytes)))
        source.read_into(whole, 0)
        header = shard_format.read_header(whole, file_bytes)
        if sorted(header.tensors) != sorted(names):
            raise CorruptShard(f"{path} does not have the tensors that were written to it.")
        buffer = memoryview(bytearray(_READ_BYTES))
        for name, entry in header.tensors.items():
            hasher = xxhash.xxh3_128()
            begin, end = (header.data_start + offset for offset in entry.data_offsets)
            for at in range(begin, end, _READ_BYTES):
                piece = buffer[: min(_READ_BYTES, end - at)]
                source.read_into(piece, at)
                hasher.update(piece)
            yield name, hasher.digest()
    finally:
        os.close(descriptor)
