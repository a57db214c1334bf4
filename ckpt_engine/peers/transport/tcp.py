"""TCP between engines: small JSON frames, and raw shards between them, straight from and into slots.

A frame must arrive whole within its timeout, which is measured with polls. Raw bytes must advance by `_PROGRESS_BYTES`
within every `io_timeout_s`, so that neither silence nor a trickle of bytes blocks a thread. For those the kernel
measures the time (SO_RCVTIMEO, SO_SNDTIMEO): polls would cost a tenth of a transfer's processor time.
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Final, Self, TypeVar

from ckpt_engine.contracts.peer_wire import MAX_FRAME_BYTES
from ckpt_engine.peers.transport.port import ByteCounters, Identity, Ranges, Transport
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, PortInUse, Unreachable

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_TIMEVAL: Final = struct.Struct("@ll")
_PROGRESS_BYTES: Final = 64 << 10
_AT_ONCE_BYTES: Final = 1 << 20  # per system call
_MAX_PORT: Final = 65535
_SHOWN_CHARACTERS: Final = 64
_HAS_ENDED: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_BACKLOG: Final = 1024  # all hosts of a job call rank 0's engine at once


class TcpConnection:
    """`port.Connection` over a connected socket."""

    transport = Transport.TCP

    def __init__(self, sock: socket.socket, settings: EngineSettings, total: ByteCounters) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.peer = Identity("", "", "")
        self._sock = sock
        self._settings = settings
        self._total = total
        sock.setblocking(True)
        limit = _TIMEVAL.pack(int(settings.io_timeout_s), int(settings.io_timeout_s % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def abort(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed

    def send(self, message: object, *, timeout_s: float) -> None:
        data = wire.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        due_s = time.monotonic() + timeout_s
        sent = 0
        with self._broken_is_unreachable("sending to"):
            while sent < len(frame):
                try:
                    sent += self._sock.send(frame[sent:], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._wait(select.POLLOUT, due_s)

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        due_s = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, due_s))
        if length > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        return wire.decode(memoryview(self._receive_exactly(length, due_s)), kind, max_bytes=MAX_FRAME_BYTES)

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        self.send(message, timeout_s=timeout_s)
        return self.receive(kind, timeout_s=timeout_s)

    def send_raw(self, data: memoryview) -> None:
        self._move(len(data), lambda start, end: self._sock.send(data[start:end]), "sending to")
        self.bytes_sent += len(data)
        self._total.add(sent=len(data))

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> None:
        def send_some(start: int, end: int) -> int:
            return os.sendfile(self._sock.fileno(), descriptor, offset + start, end - start)

        self._move(size_bytes, send_some, "sending a file to")
        self.bytes_sent += size_bytes
        self._total.add(sent=size_bytes)

    def receive_raw(self, target: memoryview, *, place: tuple[int, int] | None = None) -> bool:
        def receive_some(start: int, end: int) -> int:
            return self._sock.recv_into(target[start:end], 0, socket.MSG_WAITALL)

        self._move(len(target), receive_some, "receiving from")
        self.bytes_received += len(target)
        self._total.add(received=len(target))
        return False

    def expect(self, descriptor: int, ranges: Ranges) -> AbstractContextManager[None]:
        return nullcontext()

    def land_in(self, descriptor: int) -> AbstractContextManager[None]:
        return nullcontext()

    def _move(self, size_bytes: int, move_some: Callable[[int, int], int], doing: str) -> None:
        """`move_some(start, end)` moves bytes from `start` on, up to `end` at most, within the socket's own timeout. It
        returns their number."""
        io_timeout_s = self._settings.io_timeout_s
        moved, next_mark, due_s = 0, _PROGRESS_BYTES, time.monotonic() + io_timeout_s
        with self._broken_is_unreachable(doing):
            while moved < size_bytes:
                try:
                    count = move_some(moved, min(moved + _AT_ONCE_BYTES, size_bytes))
                except BlockingIOError as error:  # the socket's timeout
                    raise TimeoutError from error
                if count == 0:
                    raise ConnectionResetError("the other side closed the connection, or the file ended early")
                moved += count
                if moved >= next_mark:
                    next_mark, due_s = moved + _PROGRESS_BYTES, time.monotonic() + io_timeout_s
                elif time.monotonic() > due_s and moved < size_bytes:
                    raise TimeoutError

    def _receive_exactly(self, size_bytes: int, due_s: float) -> bytearray:
        data = bytearray(size_bytes)
        target = memoryview(data)
        filled = 0
        with self._broken_is_unreachable("waiting for"):
            while filled < size_bytes:
                try:
                    count = self._sock.recv_into(target[filled:], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._wait(select.POLLIN, due_s)
                    continue
                if count == 0:
                    raise ConnectionResetError("the other side closed the connection")
                filled += count
        return data

    def _wait(self, event: int, due_s: float) -> None:
        left_s = due_s - time.monotonic()
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError

    @contextmanager
    def _broken_is_unreachable(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: another thread closed it
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise Unreachable(
                f"The connection broke while {doing} the engine of {self.peer.host_id or 'a peer'}: {reason}.",
                hint="nothing to do: it is retried while the generation runs",
            ) from error


class TcpListener:
    """`port.Listener` on one address."""

    def __init__(
        self, address: str, port: int, *, fallback: bool, settings: EngineSettings, total: ByteCounters
    ) -> None:
        """Raises PortInUse if the port is taken. With `fallback` another one is used instead."""
        self._settings = settings
        self._total = total
        self._sock = _listen(address, port, fallback=fallback)
        self.port: int = self._sock.getsockname()[1]

    def accept(self) -> tuple[TcpConnection, str]:
        sock, remote = self._sock.accept()
        return TcpConnection(sock, self._settings, self._total), remote[0]

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the accept
        finally:
            self._sock.close()


def _listen(address: str, port: int, *, fallback: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if fallback and port:
            return _listen(address, 0, fallback=False)
        raise PortInUse(
            f"The checkpoint engine cannot listen on {address}:{port}: {error.strerror}.",
            hint="use a free --port (0 for any) and an --address of this host",
        ) from error


def has_ended(descriptor: int) -> bool:
    """Whether the other side of a TCP connection has ended it, as the kernel does for a killed process, or `abort`."""
    poll = select.poll()
    poll.register(descriptor, _HAS_ENDED)
    return bool(poll.poll(0))


def split_address(address: str) -> tuple[str, int]:
    """Parse "ip:port" or "[ip]:port" into (host, port). Raises InvalidMessage."""
    host, _, port = address.rpartition(":")
    if not host or re.fullmatch("[0-9]{1,5}", port) is None or not 0 < int(port) <= _MAX_PORT:
        raise InvalidMessage(
            f"{address[:_SHOWN_CHARACTERS]!r} is not an engine address.",
            hint="find the engine that announces it: the form is IP:PORT, with a port from 1 to 65535",
        )
    return host.strip("[]"), int(port)


def connect_tcp(address: str, *, settings: EngineSettings, total: ByteCounters) -> TcpConnection:
    """Connect to "ip:port", without handshake. Raises Unreachable, or InvalidMessage for a malformed address."""
    try:
        sock = socket.create_connection(split_address(address), timeout=settings.connect_timeout_s)
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"No connection to the engine at {address}: {error}.", hint="check that the host and its engine are up"
        ) from error
    return TcpConnection(sock, settings, total)
