"""The interface of a transport between engines. TCP implements it, and RDMA.

The handshake, the frames and the order of the bytes are the same over every transport and not its concern. The details
are in `tests/conformance/test_engine_transports.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

T = TypeVar("T")
Ranges = Sequence[tuple[int, int]]  # (offset, bytes) in a file, in order


class Transport(StrEnum):
    TCP = "tcp"
    RDMA = "rdma"


class Identity(msgspec.Struct, frozen=True):
    """An engine, as it introduces itself in a handshake. `job`: for which it calls; '': for any."""

    host_id: str
    address: str
    incarnation: str
    job: str = ""


class ByteCounters:
    """Raw bytes over all connections of this process, without frames. Thread-safe."""

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

    Every method raises Unreachable when the connection breaks or times out, and InvalidMessage when the other side
    violates the protocol. After either the connection is unusable.
    """

    transport: Transport
    peer: Identity  # empty until the handshake
    bytes_sent: int  # raw, as in ByteCounters
    bytes_received: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def fileno(self) -> int:
        """A descriptor that polls as readable when data, or the end of the connection, can be received."""
        ...

    def close(self) -> None: ...

    def abort(self) -> None:
        """End it from another thread. Whoever waits on it gets Unreachable at once."""
        ...

    def send(self, message: object, *, timeout_s: float) -> None:
        """Send one frame."""
        ...

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        """Receive one whole frame. One larger than MAX_FRAME_BYTES raises InvalidMessage before it is read."""
        ...

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        """Send a frame and receive the reply."""
        ...

    def send_raw(self, data: memoryview) -> None:
        """Send bytes without a frame, without copying them. If they stop moving, the connection breaks."""
        ...

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> None:
        """Send bytes of an open file without a frame, past this process if the transport can."""
        ...

    def receive_raw(self, target: memoryview, *, place: tuple[int, int] | None = None) -> bool:
        """Fill `target` with bytes without a frame. If they stop moving, the connection breaks. In the body of `expect`
        or `land_in`, `place` says which file they are for (its descriptor), and where in it; without it, `target` is a
        mapping of that. Returns whether the transport has written all of them there itself."""
        ...

    def expect(self, descriptor: int, ranges: Ranges) -> AbstractContextManager[None]:
        """The next raw bytes are for these ranges of an open file, and `receive_raw` is told so by `place`. Enter it
        before the reply that makes the other side send them. A transport with one-sided writes lets the other side
        write there, and nowhere else, until the body ends. Leaving it does not raise."""
        ...

    def land_in(self, descriptor: int) -> AbstractContextManager[None]:
        """In the body, `receive_raw` takes the bytes of this open file, in order and from its beginning. A transport
        with one-sided reads may read ahead into it until the body ends. Leaving it does not raise."""
        ...


class Listener(Protocol):
    """Accepts connections from peers."""

    port: int

    def accept(self) -> tuple[Connection, str]:
        """The next connection and its remote address. Raises OSError, also after `close`."""
        ...

    def close(self) -> None:
        """Stop listening, and wake `accept`."""
        ...
