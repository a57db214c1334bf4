"""Accepts connections from other engines, one thread each. None is served before it has proved to have the token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import structlog

from ckpt_engine.contracts.peer_wire import OfferQueuePair, PeerRequest
from ckpt_engine.counters import Counters
from ckpt_engine.peers.transport.handshake import KeysOf, admit, refuse
from ckpt_engine.peers.transport.port import Connection, Identity, Listener
from ckpt_engine.peers.transport.upgrade import check_offer, refuse_offer
from ckpt_engine.settings import EngineSettings
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import FlyballError, InvalidMessage, Unauthorized, Unreachable

log = structlog.get_logger()

Handler = Callable[[Connection, PeerRequest], None]
AnswerOffer = Callable[[Connection, OfferQueuePair, bytes], Connection]  # the connection to go on with
_Request = PeerRequest | OfferQueuePair

_OPENING = 1  # a connection for shards of a job that is being opened or closed, beside those in the pool
_REFUSAL_TIMEOUT_S = 0.05  # the frame fits into the socket's empty buffer


class PeerServer:
    """Accepts connections until it is closed.

    At most `max_connections` are open, more if the jobs have more hosts (`expect`). Beyond that, the oldest connection
    that has not shown the token is closed. If all have shown it, the new one is refused with a reason.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        identity: Identity,
        keys_of: KeysOf,
        settings: EngineSettings,
        counters: Counters,
        handle: Handler,
        on_hello: Callable[[Identity], None],
        answer_offer: AnswerOffer | None = None,
    ) -> None:
        """`handle` answers one request on its connection. `on_hello` gets who connected, and its address.
        `answer_offer` gets an offered queue pair, and the connection's key; None: all are refused."""
        self._listener = listener
        self._identity = identity
        self._keys_of = keys_of
        self._settings = settings
        self._counters = counters
        self._handle = handle
        self._on_hello = on_hello
        self._answer_offer = answer_offer or self._refuse_offer
        self._capacity = settings.max_connections
        self._strangers: dict[Connection, None] = {}  # have not shown the token yet; oldest first
        self._known: set[Connection] = set()
        self._lock = threading.Lock()
        self._thread = WorkerThread(
            "peer-accept", self._accept, counters=counters, retry_s=settings.reconnect_interval_s
        )

    def start(self) -> None:
        self._thread.start()

    def expect(self, linked_hosts: int, jobs: int) -> None:
        """Make room for so many hosts, each with a link, and with connections for the shards of each of these jobs:
        every host of a job calls rank 0's engine."""
        of_a_job = self._settings.pool_connections_per_peer + _OPENING
        self._capacity = max(self._settings.max_connections, linked_hosts * (1 + jobs * of_a_job))

    def close(self) -> None:
        """Stop listening and break all connections."""
        with self._lock:
            self._thread.stop()
            connections = [*self._strangers, *self._known]
        try:
            self._listener.close()
        except OSError as error:
            log.debug("listener_closed", reason=str(error))
        for connection in connections:
            connection.abort()

    def _accept(self) -> float | None:
        """Accept one connection. Returns a pause if there is no free descriptor or thread."""
        try:
            connection, remote = self._listener.accept()
        except OSError as error:  # out of descriptors
            return self._pause_s(error)
        if self._make_room(connection, remote):
            context: dict[str, object] = {"remote": remote}
            serve = partial(self._serve, connection, remote, context)
            thread = WorkerThread(f"peer-{remote}", serve, counters=self._counters, context=context, retry_s=None)
            try:
                thread.start()
            except RuntimeError as error:  # out of threads
                self._forget(connection)
                connection.close()
                return self._pause_s(error)
        return 0.0

    def _pause_s(self, error: OSError | RuntimeError) -> float | None:
        """Seconds until the next connection is accepted; None if the server is closed."""
        if self._thread.stopping:
            return None
        log.error("accept_failed", reason=str(error))
        return self._settings.reconnect_interval_s

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.discard(connection)

    def _make_room(self, connection: Connection, remote: str) -> bool:
        with self._lock:
            full = len(self._strangers) + len(self._known) >= self._capacity
            evicted = next(iter(self._strangers), None) if full else None
            admitted = not self._thread.stopping and (not full or evicted is not None)
            if evicted is not None:
                del self._strangers[evicted]
            if admitted:
                self._strangers[connection] = None
        if evicted is not None:
            log.warning("stranger_evicted", limit=self._capacity)
            evicted.abort()
        if not admitted:
            self._turn_away(connection, remote)
        return admitted

    def _let_in(self, connection: Connection) -> None:
        """The connection has shown the token. Raises Unreachable if it was evicted at the last moment."""
        with self._lock:
            if connection not in self._strangers:
                raise Unreachable("It was closed to make room for another connection.")
            del self._strangers[connection]
            self._known.add(connection)

    def _turn_away(self, connection: Connection, remote: str) -> None:
        log.warning("connection_refused", remote=remote, limit=self._capacity)
        reason = f"all {self._capacity} connections are in use (FLYBALL_CKPT_MAX_CONNECTIONS)."
        with connection:
            try:
                refuse(connection, reason, timeout_s=_REFUSAL_TIMEOUT_S)
            except FlyballError as error:
                log.debug("refusal_not_sent", remote=remote, reason=error.message)

    def _upgrade(self, connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        """Raises Unreachable if the server was closed meanwhile."""
        upgraded = self._answer_offer(connection, offer, key)
        with self._lock:
            self._known.discard(connection)
            if not (closing := self._thread.stopping):
                self._known.add(upgraded)  # `close` breaks it
        if closing:
            upgraded.close()
            raise Unreachable("The engine is being ended.")
        return upgraded

    def _refuse_offer(self, connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        check_offer(connection, offer, key=key)
        refuse_offer(connection, "it takes no queue pairs", key=key, timeout_s=self._settings.handshake_timeout_s)
        return connection

    def _serve(self, connection: Connection, remote: str, context: dict[str, object]) -> None:
        try:
            key = admit(
                connection,
                identity=self._identity,
                keys_of=self._keys_of,
                timeout_s=self._settings.handshake_timeout_s,
                on_shown=partial(self._let_in, connection),
            )
            context["peer"] = connection.peer.host_id
            self._on_hello(connection.peer)
            while True:
                request: _Request = connection.receive(_Request, timeout_s=self._settings.idle_timeout_s)  # type: ignore[arg-type]  # a union is no type[T]
                if not isinstance(request, OfferQueuePair):
                    self._handle(connection, request)
                elif key:
                    connection, key = self._upgrade(connection, request, key), b""
                else:
                    raise InvalidMessage("A second queue pair was offered on one connection.")
        except Unreachable:
            log.debug("connection_ended", peer=connection.peer.host_id, remote=remote)
        except Unauthorized as error:
            log.warning("peer_refused", remote=remote, reason=error.message)
        except (FlyballError, OSError) as error:
            log.warning("connection_failed", peer=connection.peer.host_id, remote=remote, reason=str(error))
        finally:
            connection.close()
            self._forget(connection)
            if connection.bytes_sent or connection.bytes_received:
                log.info(
                    "connection_bytes",
                    peer=connection.peer.host_id,
                    transport=str(connection.transport),
                    sent=connection.bytes_sent,
                    received=connection.bytes_received,
                )
