"""The bytes of a shard: own memory, or a file that another process may shorten, which is read by system calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias


class FilePayload(Protocol):
    """Bytes that are copied before anybody looks at them."""

    def __len__(self) -> int: ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Raises CorruptShard if they end before, OSError."""


Payload: TypeAlias = memoryview | FilePayload


def windows(payload: Payload, window_bytes: int, *, begin: int = 0, end: int | None = None) -> Iterator[memoryview]:
    """These bytes in order, `window_bytes` at a time. Each window is valid until the next one is taken: of a file, all
    are copies in one buffer."""
    end = len(payload) if end is None else end
    if isinstance(payload, memoryview):
        for start in range(begin, end, window_bytes):
            yield payload[start : min(start + window_bytes, end)]
        return
    buffer = memoryview(bytearray(min(window_bytes, end - begin)))
    for start in range(begin, end, window_bytes):
        window = buffer[: min(window_bytes, end - start)]
        payload.read_into(window, start)
        yield window


def read_into(payload: Payload, target: memoryview, offset: int) -> None:
    """Copy bytes from `offset` on. Raises as `FilePayload.read_into`."""
    if isinstance(payload, memoryview):
        target[:] = payload[offset : offset + len(target)]
    else:
        payload.read_into(target, offset)
