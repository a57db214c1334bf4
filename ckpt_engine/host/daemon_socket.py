"""The Unix socket on which the host daemon gives orders and asks questions (`flyball.contracts.on_host.engine_wire`),
and the datagram socket on which trainers give notice."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from ckpt_engine.contracts.notices import MAX_NOTICE_BYTES, Notice
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, InvalidMessage
from flyball.contracts.on_host.engine_wire import MAX_ENGINE_FRAME_BYTES, EngineReply, EngineRequest

log = structlog.get_logger()

_LENGTH: Final = struct.Struct("<I")


class ControlServer:
    """Answers requests, one at a time per connection. The folder's mode keeps other users out."""

    def __init__(self, path: Path, *, settings: EngineSettings, handle: Callable[[EngineRequest], EngineReply]) -> None:
        self._path = path
        self._settings = settings
        self._handle = handle
        self._slots = threading.BoundedSemaphore(settings.max_control_connections)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(settings.max_control_connections)
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more orders."""
        self._closed = True
        self._path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.error("control_accept_failed", reason=str(error))
                    threading.Event().wait(self._settings.reconnect_interval_s)
                continue
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="control", daemon=True).start()
            else:
                log.warning("control_connection_refused", limit=self._settings.max_control_connections)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                while (data := self._receive(sock)) is not None:
                    reply = wire.encode(self._answer(data))
                    sock.settimeout(self._settings.io_timeout_s)
                    sock.sendall(_LENGTH.pack(len(reply)) + reply)
        except (FlyballError, OSError) as error:
            log.info("control_connection_ended", reason=str(error))
        finally:
            self._slots.release()

    def _answer(self, data: bytes) -> EngineReply:
        try:
            request: EngineRequest = wire.decode(data, EngineRequest, max_bytes=MAX_ENGINE_FRAME_BYTES)  # type: ignore[arg-type]  # a union is no type[T]
            return self._handle(request)
        except FlyballError as error:
            return EngineReply(ok=False, code=error.code, message=str(error))
        except Exception as error:  # logged; without an answer the daemon would wait for its deadline
            log.exception("request_crashed")
            return EngineReply(ok=False, code="error", message=f"{type(error).__name__}: {error}")

    def _receive(self, sock: socket.socket) -> bytes | None:
        """The next frame; None at the end of the connection. The first byte may be long in coming: the daemon keeps its
        connection open."""
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
    """Receives notices until it is closed."""

    def __init__(self, path: Path, *, handle: Callable[[Notice], None]) -> None:
        self._handle = handle
        self._path = path
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)

    def start(self) -> None:
        threading.Thread(target=self._receive, name="notices", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        while not self._closed:
            data = self._socket.recv(MAX_NOTICE_BYTES + 1)
            if not data:
                continue
            try:
                notice: Notice = wire.decode(data, Notice, max_bytes=MAX_NOTICE_BYTES)  # type: ignore[arg-type]  # a union is no type[T]
                self._handle(notice)
            except (FlyballError, OSError) as error:  # the scan finds what a lost notice told
                log.warning("notice_ignored", reason=str(error))


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
