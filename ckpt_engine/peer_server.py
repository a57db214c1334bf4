"""The port on which other engines call: a thread per connection, none of them before it has shown the token."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import structlog

from ckpt_engine.peer_wire import PeerRequest
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.tcp import ByteCounters, Connection, Identity, admit
from flyball.contracts.errors import FlyballError, PortInUse, Unauthorized, Unreachable

log = structlog.get_logger()

Handler = Callable[[Connection, PeerRequest], None]


def listen(address: str, port: int, *, fallback: bool) -> socket.socket:
    """A listening socket. A port that is taken raises PortInUse or, with `fallback`, is replaced by a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        if fallback and port:
            return listen(address, 0, fallback=False)
        raise PortInUse(
            f"The checkpoint engine cannot listen on {address}:{port}: {error.strerror}.",
            hint="give a free port with --port, 0 for any, and an address of this host",
        ) from error


class PeerServer:
    """Accepts connections until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        identity: Identity,
        token: bytes,
        settings: EngineSettings,
        total: ByteCounters,
        handle: Handler,
        on_hello: Callable[[Identity], None],
    ) -> None:
        """`handle` answers one request on its connection; `on_hello` hears who connected, and where it listens."""
        self._listener = listener
        self._identity = identity
        self._token = token
        self._settings = settings
        self._total = total
        self._handle = handle
        self._on_hello = on_hello
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening and break all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        except OSError as error:
            log.debug("listener_shutdown", reason=str(error))
        self._listener.close()
        for connection in connections:
            connection.abort()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, remote = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.error("accept_failed", reason=str(error))  # out of descriptors: serve those that are open
                    threading.Event().wait(self._settings.reconnect_interval_s)
                continue
            connection = Connection(sock, self._settings, self._total)
            with self._lock:
                admitted = not self._closed and len(self._open) < self._settings.max_connections
                if admitted:
                    self._open.add(connection)
            if not admitted:
                log.warning("connection_refused", remote=remote[0], limit=self._settings.max_connections)
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, remote[0]), name="peer", daemon=True).start()

    def _serve(self, connection: Connection, remote: str) -> None:
        try:
            with connection:
                admit(
                    connection,
                    identity=self._identity,
                    token=self._token,
                    timeout_s=self._settings.handshake_timeout_s,
                )
                self._on_hello(connection.peer)
                while True:
                    request: PeerRequest = connection.receive(PeerRequest, timeout_s=self._settings.idle_timeout_s)  # type: ignore[arg-type]  # a union is no type[T]
                    self._handle(connection, request)
        except Unreachable:
            log.debug("connection_ended", peer=connection.peer.host_id, remote=remote)
        except Unauthorized as error:
            log.warning("peer_refused", remote=remote, reason=error.message)
        except (FlyballError, OSError) as error:
            log.warning("connection_failed", peer=connection.peer.host_id, remote=remote, reason=str(error))
        except Exception:  # the thread's outermost frame: logged, and only this connection ends
            log.exception("connection_crashed", peer=connection.peer.host_id, remote=remote)
        finally:
            with self._lock:
                self._open.discard(connection)
            if connection.bytes_sent or connection.bytes_received:
                log.info(
                    "connection_bytes",
                    peer=connection.peer.host_id,
                    sent=connection.bytes_sent,
                    received=connection.bytes_received,
                )
