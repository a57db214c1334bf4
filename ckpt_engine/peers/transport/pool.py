"""Keeps a few connections per peer open between transfers of shards."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_engine.peers.transport.port import Connection

Dial = Callable[[str, str], Connection]  # host id, address ('': the newest known); Unreachable, Unauthorized


class ConnectionPool:
    """Lends connections by host. One that was used without an error is kept, up to a limit per peer."""

    def __init__(
        self,
        dial: Dial,
        *,
        connections_per_peer: int,
        is_outdated: Callable[[Connection], bool] = lambda connection: False,
    ) -> None:
        """An idle connection that `is_outdated` is closed, and the peer called anew, when one is wanted."""
        self._dial = dial
        self._is_outdated = is_outdated
        self._connections_per_peer = connections_per_peer
        self._idle: dict[str, list[Connection]] = {}
        self._lent: dict[str, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def connection(self, host_id: str) -> Iterator[Connection]:
        """A connection to the engine of `host_id`, for the body of the with statement."""
        connection = self._take(host_id) or self._dial(host_id, "")
        with self._lock:
            self._lent.setdefault(host_id, []).append(connection)
        kept = False
        try:
            yield connection
            kept = self._keep(host_id, connection)
        finally:
            with self._lock:
                self._lent[host_id].remove(connection)
            if not kept:
                connection.close()

    def abort(self, host_id: str) -> None:
        """The host is lost: break its connections, so that nobody waits for its answers."""
        with self._lock:
            for connection in (*self._lent.get(host_id, ()), *self._idle.get(host_id, ())):
                connection.abort()

    def close(self) -> None:
        """Close idle connections. Lent ones are closed by their users."""
        with self._lock:
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
            self._connections_per_peer = 0
        for connection in idle:
            connection.close()

    def _take(self, host_id: str) -> Connection | None:
        while True:
            with self._lock:
                idle = self._idle.get(host_id)
                connection = idle.pop() if idle else None
            if connection is None or not (_is_spent(connection) or self._is_outdated(connection)):
                return connection
            connection.close()

    def _keep(self, host_id: str, connection: Connection) -> bool:
        with self._lock:
            self._drop_spent_locked()
            idle = self._idle.setdefault(host_id, [])
            if len(idle) >= self._connections_per_peer:
                return False
            idle.append(connection)
            return True

    def _drop_spent_locked(self) -> None:
        """Nobody asks again for connections to former peers: they would stay open for good."""
        for host_id, idle in list(self._idle.items()):
            for connection in [known for known in idle if _is_spent(known)]:
                idle.remove(connection)
                connection.close()
            if not idle:
                del self._idle[host_id]


def _is_spent(connection: Connection) -> bool:
    # Nothing is sent between transfers: if it is readable, it has ended.
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
