"""The words of a control segment, read and written by system calls.

A trainer maps its words: it looks at them at every step, and a script that shortens its own segment harms itself. The
engine and the commands must not: a touch of a mapping that was shortened is a SIGBUS, which would end the engine of
every job on the host. A system call says instead how much is there. What is missing reads as zero.

The order of words is kept, as each access is a system call of its own, with the same fences in between. That a word is
never half there rests on the kernel: it copies aligned 8 bytes in one go (x86-64, arm64), though no standard says so.
So a word counts only if it was read twice alike: one that was torn by a store is whole, or another, at the next look.
"""

from __future__ import annotations

import os
from typing import Protocol, overload

_WORD_BYTES = 8
_LOOKS = 8  # at a word that changes at every look; such a one is read again by its readers anyway


class Words(Protocol):
    """Words by their number, as in `memoryview.cast("q")`."""

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> memoryview: ...
    @overload
    def __setitem__(self, key: int, value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: slice, value: memoryview, /) -> None: ...


class FileWords:
    """The words at the beginning of an open file."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._count = size_bytes // _WORD_BYTES

    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> memoryview: ...
    def __getitem__(self, key: int | slice, /) -> int | memoryview:
        if isinstance(key, int):
            return int.from_bytes(self._read(key, 1), "little", signed=True)
        begin, end, _ = key.indices(self._count)
        return memoryview(self._read(begin, end - begin)).cast("q")

    @overload
    def __setitem__(self, key: int, value: int, /) -> None: ...
    @overload
    def __setitem__(self, key: slice, value: memoryview, /) -> None: ...
    def __setitem__(self, key: int | slice, value: int | memoryview, /) -> None:
        if isinstance(value, int):
            begin, data = key, value.to_bytes(_WORD_BYTES, "little", signed=True)
        else:
            begin, data = key.indices(self._count)[0] if isinstance(key, slice) else key, value.tobytes()
        assert isinstance(begin, int)
        os.pwrite(self._descriptor, data, _WORD_BYTES * begin)

    def _read(self, first: int, count: int) -> bytes:
        data = self._look(first, count)
        for _ in range(_LOOKS):
            before, data = data, self._look(first, count)
            if data == before:
                break
        return data

    def _look(self, first: int, count: int) -> bytes:
        size_bytes = _WORD_BYTES * count
        return os.pread(self._descriptor, size_bytes, _WORD_BYTES * first).ljust(size_bytes, b"\0")
