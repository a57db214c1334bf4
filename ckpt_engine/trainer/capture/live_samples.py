"""A few bytes of every tensor that is copied lazily, read at `save` and compared when the tensor was copied. So writes
that torch does not count (through `.data`, through NumPy, by an extension of its own) are seen if they change a whole
tensor. The views that they are read through are kept: it costs half a microsecond for each tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

_WINDOW_BYTES = 64
_WINDOWS = 3  # at both ends of a tensor and in its middle
_SAMPLE_BYTES = _WINDOWS * _WINDOW_BYTES
_Window = ctypes.c_char * _WINDOW_BYTES


class Windows:
    """Views of them, for as long as the tensors keep their addresses. Read them only while the memory is held."""

    def __init__(self, extents: Iterable[tuple[int, int]]) -> None:
        """`extents`: address and size of each tensor, which is larger than a window."""
        self._windows = [
            tuple(_Window.from_address(place) for place in _places(address, size)) for address, size in extents
        ]
        self._all = [window for windows in self._windows for window in windows]

    def read(self) -> Samples:
        """What is in all of them now."""
        return Samples(self, b"".join(self._all))

    def read_one(self, number: int) -> bytes:
        """What is in tensor `number` now."""
        return b"".join(self._windows[number])


@dataclass(frozen=True, slots=True)
class Samples:
    """What was in them at the call of `save`."""

    windows: Windows
    seen: bytes

    def is_unchanged(self, number: int) -> bool:
        """Whether tensor `number` still has what was seen of it."""
        seen = self.seen[number * _SAMPLE_BYTES : (number + 1) * _SAMPLE_BYTES]
        return self.windows.read_one(number) == seen


def _places(address: int, size_bytes: int) -> tuple[int, ...]:
    last = size_bytes - _WINDOW_BYTES
    return tuple(address + last * number // (_WINDOWS - 1) for number in range(_WINDOWS))
