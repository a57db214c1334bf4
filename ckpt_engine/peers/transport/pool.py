"""Keeps a few connections per peer and job open between transfers of shards."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_engine.peers.transport.port import Connection

Dial = Callable[[str, str], Connection]  # host id, address ('': the newest known); Unreachable, Unauthorized
Key = tuple[str, str]  # host id, job


class ConnectionPool:
    """Lends connections by host and job. One that was used without an error is kept, up to a limit per peer and job."""

    def __init__(
        self,
        dial: Callable[[str, str], Connection],
        *,
        connections_per_peer: int,
        is_outdated: Callable[[Connection], bool] = lambda connection: False,
    ) -> None:
        """`dial` gets host id and job. When an idle connection that `is_outdated` is wanted, it is closed, and the peer
        called anew."""
        self._dial = dial
        self._is_outdated = is_outdated
        self._connections_per_peer = connections_per_peer
        self._idle: dict[Key, list[Connection]] = {}
        self._lent: dict[Key, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def connection(self, host_id: str, job: str) -> Iterator[Connection]:
        """A connection to the engine of `host_id` for a job, for the body of the with statement."""
        key = host_id, job
        connection = self._take(key) or self._dial(host_id, job)
        with self._lock:
            self._lent.setdefault(key, []).append(connection)
        kept = False
        try:
            yield connection
            kept = self._keep(key, connection)
        finally:
            with self._lock:
                lent = self._lent[key]
                lent.remove(connection)
                if not lent:
                    del self._lent[key]
            if not kept:
                connection.close()

    def abort(self, host_id: str) -> None:
        """The host is lost: break its connections, so that nobody waits for its answers."""
        with self._lock:
            known = [key for key in {**self._lent, **self._idle} if key[0] == host_id]
            for connection in (one for key in known for one in (*self._lent.get(key, ()), *self._idle.get(key, ()))):
                connection.abort()

    def close(self) -> None:
        """Close idle connections. Lent ones are closed by their users."""
        with self._lock:
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
            self._connections_per_peer = 0
        for connection in idle:
            connection.close()

    def _take(self, key: Key) -> Connection | None:
        while True:
            with self._lock:
                idle = self._idle.get(key)
                connection = idle.pop() if idle else None
                if idle is not None and not idle:
                    del self._idle[key]
            if connection is None or not (_is_spent(connection) or self._is_outdated(connection)):
                return connection
            connection.close()

    def _keep(self, key: Key, connection: Connection) -> bool:
        with self._lock:
            self._drop_spent_locked()
            if len(self._idle.get(key, ())) >= self._connections_per_peer:
                return False
            self._idle.setdefault(key, []).append(connection)
            return True

    def _drop_spent_locked(self) -> None:
        """Nobody asks again for connections to former peers: they would stay open for good."""
        for key, idle in list(self._idle.items()):
            for connection in [known for known in idle if _is_spent(known)]:
                idle.remove(connection)
                connection.close()
            if not idle:
                del self._idle[key]


def _is_spent(connection: Connection) -> bool:
    # Nothing is sent between transfers: if it is readable, it has ended.
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
