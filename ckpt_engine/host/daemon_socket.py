"""The engine's Unix sockets: one for the daemon's requests (`flyball.contracts.on_host.engine_wire`), and a datagram
socket for the trainers' notices."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from ckpt_engine.contracts.notices import MAX_NOTICE_BYTES, Notice
from ckpt_engine.counters import Counters
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.segment_owner import give_path
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, InvalidMessage
from flyball.contracts.on_host.engine_wire import MAX_ENGINE_FRAME_BYTES, EngineReply, EngineRequest

log = structlog.get_logger()

_LENGTH: Final = struct.Struct("<I")
_BACKLOG: Final = 1_024  # the kernel caps it at net.core.somaxconn
_MAX_MESSAGE_CHARS: Final = 10_000
_LEAVES_WITHIN_S: Final = 1.0  # the thread of a connection that was ended


class ControlServer:
    """Answers the daemon's requests, one at a time per connection. The folder's mode keeps other users out.

    A script of the daemon's user may connect as well, and say nothing: whoever waits longest without a whole request
    makes room for a new connection.
    """

    def __init__(
        self,
        path: Path,
        *,
        settings: EngineSettings,
        counters: Counters,
        handle: Callable[[EngineRequest], EngineReply],
    ) -> None:
        self._path = path
        self._settings = settings
        self._counters = counters
        self._handle = handle
        self._slots = threading.BoundedSemaphore(settings.max_control_connections)
        self._silent: dict[socket.socket, None] = {}  # connections without a whole request, oldest first
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(_BACKLOG)  # one that is full refuses the daemon, too
        self._thread = WorkerThread(
            "control-accept", self._accept, counters=counters, retry_s=settings.reconnect_interval_s
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._thread.stop()
        self._path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> float | None:
        """Accept one connection. Returns a pause if there is no free descriptor or thread."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors
            return self._pause_s(error)
        if not self._slots.acquire(blocking=False) and not self._take_from_silent():
            log.warning("control_connection_refused", limit=self._settings.max_control_connections)
            sock.close()
            return 0.0
        self._note_silent(sock, True)
        try:
            WorkerThread("control", partial(self._serve, sock), counters=self._counters, retry_s=None).start()
        except RuntimeError as error:  # out of threads
            self._note_silent(sock, False)
            self._slots.release()
            sock.close()
            return self._pause_s(error)
        return 0.0

    def _take_from_silent(self) -> bool:
        """Get the slot of the connection that was silent for longest. False if all are being answered."""
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            del self._silent[oldest]
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)  # its thread leaves
        return self._slots.acquire(timeout=_LEAVES_WITHIN_S)

    def _pause_s(self, error: OSError | RuntimeError) -> float | None:
        """Seconds until the next connection is accepted; None if the server is closed."""
        if self._thread.stopping:
            return None
        log.error("control_accept_failed", reason=str(error))
        return self._settings.reconnect_interval_s

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                while (data := self._next(sock)) is not None:
                    reply = self._answer(data)
                    sock.settimeout(self._settings.io_timeout_s)
                    sock.sendall(_LENGTH.pack(len(reply)) + reply)
                    self._note_silent(sock, True)
        except (FlyballError, OSError) as error:
            log.info("control_connection_ended", reason=str(error))
        finally:
            self._note_silent(sock, False)
            self._slots.release()

    def _answer(self, data: bytes) -> bytes:
        """A reply, whatever happens: without one the daemon would wait for its deadline, and take this for dead."""
        try:
            request: EngineRequest = wire.decode(data, EngineRequest, max_bytes=MAX_ENGINE_FRAME_BYTES)  # type: ignore[arg-type]  # a union is no type[T]
            reply = wire.encode(self._handle(request))
            if len(reply) <= MAX_ENGINE_FRAME_BYTES:
                return reply
            raise InvalidMessage(f"The reply has {len(reply)} bytes, the limit is {MAX_ENGINE_FRAME_BYTES}.")
        except FlyballError as error:
            refusal = EngineReply(ok=False, code=error.code, message=wire.sendable(str(error), _MAX_MESSAGE_CHARS))
        except Exception as error:
            log.exception("request_crashed")
            what = f"{type(error).__name__}: {error}"
            refusal = EngineReply(ok=False, code="error", message=wire.sendable(what, _MAX_MESSAGE_CHARS))
        return wire.encode(refusal)

    def _note_silent(self, sock: socket.socket, is_silent: bool) -> None:
        with self._lock:
            if is_silent:
                self._silent[sock] = None
            else:
                self._silent.pop(sock, None)

    def _next(self, sock: socket.socket) -> bytes | None:
        try:
            return self._receive(sock)
        finally:
            self._note_silent(sock, False)

    def _receive(self, sock: socket.socket) -> bytes | None:
        """The next frame; None at the end of the connection. There is no timeout before the first byte: a silent
        connection costs nothing until others want its place."""
        sock.settimeout(None)
        head = sock.recv(_LENGTH.size)
        if not head:
            return None
        sock.settimeout(self._settings.io_timeout_s)
        head += _receive_exactly(sock, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_ENGINE_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {length} bytes exceeds the limit of {MAX_ENGINE_FRAME_BYTES}.")
        return _receive_exactly(sock, length)


class NoticeListener:
    """Receives the trainers' notices."""

    def __init__(self, path: Path, *, counters: Counters, handle: Callable[[Notice], None]) -> None:
        self._handle = handle
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        give_path(path)
        self._thread = WorkerThread("notices", self._receive, counters=counters)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.stop()
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> float | None:
        try:
            data = self._socket.recv(MAX_NOTICE_BYTES + 1)
        except OSError:
            if self._thread.stopping:
                return None
            raise
        try:
            if data:
                notice: Notice = wire.decode(data, Notice, max_bytes=MAX_NOTICE_BYTES)  # type: ignore[arg-type]  # a union is no type[T]
                self._handle(notice)
        except (FlyballError, OSError) as error:  # the scans make up for a lost notice
            log.warning("notice_ignored", reason=str(error))
        return 0.0


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        received = sock.recv_into(view[filled:])
        if received == 0:
            raise ConnectionResetError("the connection ended within a frame")
        filled += received
    return bytes(data)
