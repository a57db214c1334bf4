"""What a transport between engines has to offer. TCP is the one that there is; RDMA is to come in by this door.

The handshake, the frames' meaning and the order of the bytes are the same over every transport, and none of its
business; `tests/conformance/test_engine_transports.py` says in detail what it must do.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

T = TypeVar("T")


class Identity(msgspec.Struct, frozen=True):
    """What an engine says of itself in a handshake."""

    host_id: str
    address: str
    incarnation: str


class ByteCounters:
    """Raw bytes that crossed connections of this process; frames are not counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0

    def add(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._sent += sent
            self._received += received

    @property
    def sent(self) -> int:
        return self._sent

    @property
    def received(self) -> int:
        return self._received


class Connection(Protocol):
    """One connection to one peer, for one thread at a time.

    Every method raises Unreachable when the connection breaks or its time is up, and InvalidMessage when the other side
    does not keep to the protocol; the connection is of no use after either.
    """

    peer: Identity  # empty until the handshake
    bytes_sent: int  # raw, as in ByteCounters
    bytes_received: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def fileno(self) -> int:
        """A descriptor that polls as readable when there is something to receive, be it the end of the connection."""
        ...

    def close(self) -> None: ...

    def abort(self) -> None:
        """End it from another thread: whoever waits on it gets Unreachable at once."""
        ...

    def send(self, message: object, *, timeout_s: float) -> None:
        """One frame."""
        ...

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        """One frame, whole within `timeout_s`; larger than MAX_FRAME_BYTES it is InvalidMessage before it is read."""
        ...

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        """Send a frame and receive the answer."""
        ...

    def send_raw(self, data: memoryview) -> None:
        """Bytes without a frame, from where they lie. It breaks the connection if they stop moving."""
        ...

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> None:
        """Bytes of an open file without a frame; without passing through this process where the transport can."""
        ...

    def receive_raw(self, target: memoryview) -> None:
        """Fill `target` with bytes without a frame. It breaks the connection if they stop moving."""
        ...


class Listener(Protocol):
    """Where peers connect."""

    port: int

    def accept(self) -> tuple[Connection, str]:
        """The next connection, and the address that it came from. Raises OSError, also when it was closed."""
        ...

    def close(self) -> None:
        """Stop listening; wakes `accept`."""
        ...
