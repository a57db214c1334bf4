"""What travels over a queue pair besides the bytes that one side writes into, or reads from, the other's memory.

Each message is a SEND, or the end of a WRITE, whose 32 immediate bits are its kind and a count. The order of the
messages is the order of the bytes of the connection.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from flyball.contracts.errors import InvalidMessage

PIECE_BYTES: Final = 4 << 20  # of one read or write: by these the other side sees the bytes move
MAX_COUNT: Final = (1 << 28) - 1
MAX_SEGMENTS: Final = 256  # that wait for bytes: each has a key of its own, and NICs make keys slowly
_KIND_SHIFT: Final = 28
_SEGMENT: Final = struct.Struct("<QQI")


class Kind(IntEnum):
    STREAM = 1  # the payload goes on where the last one ended
    WINDOW = 2  # where the next bytes of files may be written; the payload is segments
    PLACED = 3  # so many more bytes have been written into the windows
    EXPORT = 4  # where the next bytes can be read; the payload is one segment
    TAKEN = 5  # the oldest export has been read
    CREDIT = 6  # so many messages, of other kinds, have been used up, and their buffers are free again


class Segment(NamedTuple):
    """Memory of the other side."""

    address: int
    size_bytes: int
    key: int


def pack_immediate(kind: Kind, count: int = 0) -> int:
    if not 0 <= count <= MAX_COUNT:
        raise ValueError(f"{count} does not fit into a message")
    return kind << _KIND_SHIFT | count


def unpack_immediate(bits: int) -> tuple[Kind, int]:
    """Raises InvalidMessage."""
    try:
        return Kind(bits >> _KIND_SHIFT), bits & MAX_COUNT
    except ValueError:
        raise InvalidMessage(f"A message of unknown kind {bits >> _KIND_SHIFT} arrived over RDMA.") from None


def pack_segments(segments: Iterable[Segment]) -> bytes:
    return b"".join(_SEGMENT.pack(*segment) for segment in segments)


def unpack_segments(payload: bytes) -> list[Segment]:
    """Raises InvalidMessage."""
    if not payload or len(payload) % _SEGMENT.size:
        raise InvalidMessage(f"A list of memory segments cannot be {len(payload)} bytes long.")
    segments = [Segment(*fields) for fields in _SEGMENT.iter_unpack(payload)]
    if any(segment.size_bytes == 0 or segment.address + segment.size_bytes > 1 << 64 for segment in segments):
        raise InvalidMessage("A memory segment is empty, or longer than memory.")
    return segments


def split_segments(segments: Sequence[Segment], payload_bytes: int) -> Iterator[bytes]:
    """The payloads of as many messages as the segments need, each of `payload_bytes` at most."""
    per_message = payload_bytes // _SEGMENT.size
    for start in range(0, len(segments), per_message):
        yield pack_segments(segments[start : start + per_message])


class WriteWindows:
    """Where the other side wants the next bytes of files."""

    def __init__(self) -> None:
        self._segments: deque[Segment] = deque()

    def announce(self, segments: Sequence[Segment]) -> None:
        """Raises InvalidMessage if there are far too many."""
        if len(self._segments) + len(segments) > MAX_SEGMENTS:
            raise InvalidMessage(f"The other side announced more than {MAX_SEGMENTS} memory segments.")
        self._segments.extend(segments)

    def take(self, size_bytes: int, *, most_bytes: int) -> list[Segment]:
        """Where the next `size_bytes` go, in pieces of `most_bytes` at most; less if less is announced."""
        pieces: list[Segment] = []
        while size_bytes > 0 and self._segments:
            address, room_bytes, key = self._segments.popleft()
            count = min(size_bytes, room_bytes, most_bytes)
            pieces.append(Segment(address, count, key))
            size_bytes -= count
            if count < room_bytes:
                self._segments.appendleft(Segment(address + count, room_bytes - count, key))
        return pieces


class Patience:
    """How long to wait: until something is there, or for raw bytes as long as they advance by `PROGRESS_BYTES` within
    every `io_timeout_s`."""

    def __init__(self, now_s: float, timeout_s: float, *, progress_bytes: int = 0) -> None:
        """`progress_bytes` 0: the time ends whatever moves."""
        self._timeout_s = timeout_s
        self._progress_bytes = progress_bytes
        self._moved = 0
        self.due_s = now_s + timeout_s

    def moved(self, size_bytes: int, now_s: float) -> None:
        self._moved += size_bytes
        if self._progress_bytes and self._moved >= self._progress_bytes:
            self._moved, self.due_s = 0, now_s + self._timeout_s
