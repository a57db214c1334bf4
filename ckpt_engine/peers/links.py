"""The standing connections between engines. They carry world steps and reports. A broken link is how the death of a
host is noticed even without traffic, and an answer on it proves that the host is alive.

One thread per peer. Per key only the newest message is kept until the peer has taken it, so a peer that was away gets
the present state, not a backlog.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Hashable, Iterable

import structlog

from ckpt_engine.contracts.peer_wire import Ping, Reply, SavedSteps, ShardVerdict, WorldStep
from ckpt_engine.counters import Counters
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.worker_thread import WorkerThread
from flyball.backoff import pause_s
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.testimony import Testimony

log = structlog.get_logger()

StateMessage = WorldStep | SavedSteps
Key = tuple[str, Hashable]  # the job, and what the message is about
_BUSY_GROWTH = 1.5  # of the pause before a message is offered again, up to the ping interval

OnUp = Callable[[str, str], None]  # host id, incarnation
OnLost = Callable[[str], None]  # host id


class PeerLink:
    """The standing connection to one peer."""

    def __init__(
        self,
        host_id: str,
        *,
        dial: Dial,
        on_up: OnUp,
        on_lost: OnLost,
        settings: EngineSettings,
        counters: Counters,
    ) -> None:
        """`on_lost` is called once the peer has been unreachable for `io_timeout_s`: stop waiting for it."""
        self.host_id = host_id
        self._dial = dial
        self._on_up = on_up
        self._on_lost = on_lost
        self._settings = settings
        self._lock = threading.Lock()
        self._waiting: dict[Key, StateMessage] = {}
        self._down_since: float | None = None
        self._answered: tuple[float, float | None] | None = None  # when it last did, and its daemon's age then
        self._lost = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = WorkerThread(
            f"link-{host_id}",
            self._connect_and_serve,
            counters=counters,
            on_end=self._close_wake,
            retry_s=settings.reconnect_interval_s,
        )
        self._thread.start()

    @property
    def down_s(self) -> float:
        """How long the peer has been unreachable; 0.0 if it is reachable, or was not tried yet."""
        since = self._down_since
        return 0.0 if since is None else max(time.monotonic() - since, 1e-9)

    def testimony(self) -> Testimony | None:
        """Evidence that the peer is alive; None while it is unreachable, or has not answered yet."""
        answered = self._answered
        if answered is None or self._down_since is not None:
            return None
        answered_s, daemon_s = answered
        return Testimony(self.host_id, engine_s=max(time.monotonic() - answered_s, 0.0), daemon_s=daemon_s)

    def post(self, key: Key, message: StateMessage, *, unless: Callable[[], bool]) -> None:
        """Send soon. A newer message replaces an unsent one with the same key. Dropped if `unless()`, which is called
        under the lock: `forget` cannot come between it and the queue."""
        with self._lock:
            if unless():
                return
            self._waiting[key] = message
        self._nudge()

    def forget(self, job: str) -> None:
        """Drop the unsent messages of a job that has ended. The peer may not know the job, and would answer BUSY for
        ever."""
        with self._lock:
            for key in [key for key in self._waiting if key[0] == job]:
                del self._waiting[key]

    def stop(self) -> None:
        """End the link and drop what was not sent."""
        self._thread.stop()
        self._nudge()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _nudge(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _connect_and_serve(self) -> float:
        try:
            connection = self._dial(self.host_id, "")
        except FlyballError as error:
            self._went_down(error)
            return self._settings.reconnect_interval_s
        with connection:
            self._came_up(connection)
            self._serve_until_broken(connection)
        return 0.0

    def _came_up(self, connection: Connection) -> None:
        if self._down_since is not None:
            log.info("peer_reachable", peer=self.host_id, away_s=round(self.down_s, 3))
        self._down_since = None
        self._lost = False
        self._on_up(self.host_id, connection.peer.incarnation)

    def _went_down(self, error: FlyballError) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            log.warning("peer_unreachable", peer=self.host_id, reason=error.message)
        elif self.down_s > self._settings.io_timeout_s and not self._lost:
            self._lost = True
            self._on_lost(self.host_id)

    def _serve_until_broken(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except FlyballError as error:  # not down yet: first a new connection is tried
            log.info("peer_connection_lost", peer=self.host_id, reason=error.message)

    def _serve(self, connection: Connection) -> None:
        """Send what is waiting, or pings. Ends with an exception, or at `stop`."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        deferred: set[Key] = set()  # answered BUSY: the peer will know the generation soon
        tries = 1
        while not self._thread.stopping:
            sent = self._send_waiting(connection, deferred)
            wait_s = self._busy_pause_s(tries) if deferred else self._settings.ping_interval_s
            ready = poll.poll(0 if sent else wait_s * 1000)
            if any(descriptor == self._wake for descriptor, _ in ready):
                os.eventfd_read(self._wake)
            elif deferred and not ready and not sent:
                deferred.clear()
                tries += 1
            elif not sent or ready:  # nothing to do, or the connection has ended
                self._exchange(connection, Ping())
            if not deferred and not self._waiting:
                tries = 1

    def _busy_pause_s(self, tries: int) -> float:
        return pause_s(
            tries,
            first_s=self._settings.replicate_retry_s,
            longest_s=self._settings.ping_interval_s,
            factor=_BUSY_GROWTH,
        )

    def _send_waiting(self, connection: Connection, deferred: set[Key]) -> bool:
        with self._lock:
            waiting = [item for item in self._waiting.items() if item[0] not in deferred]
        for key, message in waiting:
            reply = self._exchange(connection, message)
            if reply.verdict is ShardVerdict.BUSY:
                deferred.add(key)
                continue
            with self._lock:
                if self._waiting.get(key) is message:
                    del self._waiting[key]
        return bool(waiting)

    def _exchange(self, connection: Connection, message: Ping | StateMessage) -> Reply:
        sent_s = time.monotonic()
        reply = connection.request(message, Reply, timeout_s=self._settings.ping_timeout_s)
        self._answered = (sent_s, reply.daemon_s)
        return reply


class PeerLinks:
    """The links of all jobs of this engine. A peer that two jobs share has one link."""

    def __init__(
        self, *, dial: Dial, on_up: OnUp, on_lost: OnLost, settings: EngineSettings, counters: Counters
    ) -> None:
        self._dial = dial
        self._on_up = on_up
        self._on_lost = on_lost
        self._settings = settings
        self._counters = counters
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}

    def set_targets(self, hosts: frozenset[str]) -> None:
        """Keep a link to each of these hosts, and to no other."""
        with self._lock:
            for host_id in self._links.keys() - hosts:
                self._links.pop(host_id).stop()
            for host_id in hosts - self._links.keys():
                self._links[host_id] = PeerLink(
                    host_id,
                    dial=self._dial,
                    on_up=self._on_up,
                    on_lost=self._on_lost,
                    settings=self._settings,
                    counters=self._counters,
                )

    def forget(self, job: str) -> None:
        """Drop the unsent messages of a job that has ended here."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.forget(job)

    def post(self, host_id: str, key: Key, message: StateMessage, *, unless: Callable[[], bool]) -> None:
        """Send to a host if it has a link. `unless`: see `PeerLink.post`. If it is true before `forget` is called,
        nothing is queued afterwards."""
        with self._lock:
            link = self._links.get(host_id)
        if link is not None:
            link.post(key, message, unless=unless)

    def down_s(self, host_id: str) -> float:
        with self._lock:
            link = self._links.get(host_id)
        return 0.0 if link is None else link.down_s

    def targets(self) -> frozenset[str]:
        """The hosts that have a link."""
        with self._lock:
            return frozenset(self._links)

    def unreachable(self) -> tuple[str, ...]:
        """Peers whose connection broke and could not be restored so far."""
        with self._lock:
            return tuple(sorted(host_id for host_id, link in self._links.items() if link.down_s > 0))

    def testimonies(self, hosts: Iterable[str]) -> tuple[Testimony, ...]:
        """One for each of these hosts that answers."""
        with self._lock:
            links = [self._links[host_id] for host_id in hosts if host_id in self._links]
        return tuple(testimony for link in links if (testimony := link.testimony()) is not None)

    def close(self) -> None:
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.stop()
        for link in links:
            link.join(self._settings.ping_timeout_s)
