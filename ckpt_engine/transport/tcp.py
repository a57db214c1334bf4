"""TCP between engines: small JSON frames, and shards raw between them, straight from and into slots.

Sockets never block: every wait is a poll with a deadline. A frame must be whole within its time; raw bytes must move on
by `_PROGRESS_BYTES` within every `io_timeout_s`, so that neither silence nor single dripping bytes hold a thread.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

from ckpt_engine.peer_wire import MAX_FRAME_BYTES
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.port import ByteCounters, Identity
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, PortInUse, Unreachable

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PROGRESS_BYTES: Final = 64 << 10
_BACKLOG: Final = 1024  # all hosts of a job call rank 0's engine at the same moment


class TcpConnection:
    """`port.Connection` over a connected socket."""

    def __init__(self, sock: socket.socket, settings: EngineSettings, total: ByteCounters) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.peer = Identity("", "", "")
        self._sock = sock
        self._settings = settings
        self._total = total
        sock.setblocking(False)
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
            return  # it was closed already

    def send(self, message: object, *, timeout_s: float) -> None:
        data = wire.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        deadline_s = time.monotonic() + timeout_s
        with self._broken_is_unreachable("sending to"):
            self._send(len(frame), lambda start: self._sock.send(frame[start:]), lambda: deadline_s)

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        deadline_s = time.monotonic() + timeout_s
        length_bytes = bytearray(_LENGTH.size)
        with self._broken_is_unreachable("waiting for"):
            self._fill(memoryview(length_bytes), lambda: deadline_s)
        (length,) = _LENGTH.unpack(length_bytes)
        if length > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        data = bytearray(length)
        with self._broken_is_unreachable("waiting for"):
            self._fill(memoryview(data), lambda: deadline_s)
        return wire.decode(memoryview(data), kind, max_bytes=MAX_FRAME_BYTES)

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        self.send(message, timeout_s=timeout_s)
        return self.receive(kind, timeout_s=timeout_s)

    def send_raw(self, data: memoryview) -> None:
        self._send_counted(len(data), lambda start: self._sock.send(data[start:]))

    def send_file(self, descriptor: int, offset: int, size_bytes: int) -> None:
        def send_some(start: int) -> int:
            count = os.sendfile(self._sock.fileno(), descriptor, offset + start, size_bytes - start)
            if count == 0:
                raise OSError("the file ended early")
            return count

        self._send_counted(size_bytes, send_some)

    def receive_raw(self, target: memoryview) -> None:
        with self._broken_is_unreachable("receiving from"):
            self._fill(target, self._io_deadline_s)
        self.bytes_received += len(target)
        self._total.add(received=len(target))

    def _send_counted(self, size_bytes: int, send_some: Callable[[int], int]) -> None:
        with self._broken_is_unreachable("sending to"):
            self._send(size_bytes, send_some, self._io_deadline_s)
        self.bytes_sent += size_bytes
        self._total.add(sent=size_bytes)

    def _io_deadline_s(self) -> float:
        return time.monotonic() + self._settings.io_timeout_s

    def _send(self, size_bytes: int, send_some: Callable[[int], int], deadline_s: Callable[[], float]) -> None:
        """`send_some(start)` sends what the socket takes of the bytes from `start` on, and says how many that were."""
        sent, due_s, next_mark = 0, deadline_s(), _PROGRESS_BYTES
        while sent < size_bytes:
            try:
                sent += send_some(sent)
            except BlockingIOError:
                self._wait(select.POLLOUT, due_s)
                continue
            if sent >= next_mark:
                due_s, next_mark = deadline_s(), sent + _PROGRESS_BYTES

    def _fill(self, target: memoryview, deadline_s: Callable[[], float]) -> None:
        filled, due_s, next_mark = 0, deadline_s(), _PROGRESS_BYTES
        while filled < len(target):
            try:
                count = self._sock.recv_into(target[filled:])
            except BlockingIOError:
                self._wait(select.POLLIN, due_s)
                continue
            if count == 0:
                raise ConnectionResetError("the other side closed the connection")
            filled += count
            if filled >= next_mark:
                due_s, next_mark = deadline_s(), filled + _PROGRESS_BYTES

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
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError: closed under our feet
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise Unreachable(
                f"The connection broke while {doing} the engine of {self.peer.host_id or 'a peer'}: {reason}.",
                hint="it is tried again while the generation runs",
            ) from error


class TcpListener:
    """`port.Listener` on one address."""

    def __init__(
        self, address: str, port: int, *, fallback: bool, settings: EngineSettings, total: ByteCounters
    ) -> None:
        """A port that is taken raises PortInUse or, with `fallback`, is replaced by a free one."""
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
            hint="give a free port with --port, 0 for any, and an address of this host",
        ) from error


def connect_tcp(address: str, *, settings: EngineSettings, total: ByteCounters) -> TcpConnection:
    """A connection to "ip:port", the handshake not yet made. Raises Unreachable."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=settings.connect_timeout_s)
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"No connection to the engine at {address}: {error}.", hint="see whether that host and its engine are up"
        ) from error
    return TcpConnection(sock, settings, total)
