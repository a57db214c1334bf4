"""A slot's bytes, read and written by system calls: not mapped, so a script that shortens its slots harms only itself.

A mapping that was shortened ends the process that touches it by SIGBUS; see `file_words`.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from ckpt_engine.format.verified_read import FileSource


class SlotBytes(FileSource):
    """The open file of one slot. Close it, or use it in a with statement. Bytes may change while it is open."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Owns the descriptor."""
        super().__init__(descriptor)
        self.descriptor = descriptor
        self._size_bytes = size_bytes

    def __len__(self) -> int:
        return self._size_bytes

    def write(self, data: memoryview, offset: int) -> None:
        """Raises OSError, also if memory has run out."""
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
