"""The standing connections between engines: world steps and reports travel on them, their end is how the death of a
host is noticed without traffic, and what is answered on them is how its life is.

One thread per peer. Messages are kept newest-per-key until the peer has taken them, so that a peer that was away for a
while gets the present state and not a backlog.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Hashable, Iterable

import structlog

from ckpt_engine.contracts.peer_wire import CommittedSteps, Ping, Reply, ShardVerdict, WorldStep
from ckpt_engine.counters import Counters
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.testimony import Testimony

log = structlog.get_logger()

StateMessage = WorldStep | CommittedSteps
Key = tuple[str, Hashable]  # the job, and what of it the message speaks of
_BUSY_GROWTH = 1.5  # of the pause between two tries, up to the interval of pings

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
        """`on_lost` is called when the peer has been out of reach for `io_timeout_s`: who waits for it may stop."""
        self.host_id = host_id
        self._dial = dial
        self._on_up = on_up
        self._on_lost = on_lost
        self._settings = settings
        self._lock = threading.Lock()
        self._waiting: dict[Key, StateMessage] = {}
        self._down_since: float | None = None
        self._heard: tuple[float, float | None] | None = None  # when it last answered; what it said of its daemon then
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
        """For how long the peer has been out of reach; 0.0 if it is in reach, or was not tried yet."""
        since = self._down_since
        return 0.0 if since is None else max(time.monotonic() - since, 1e-9)

    def testimony(self) -> Testimony | None:
        """That the peer lives; None while it is out of reach, or has not answered yet."""
        heard = self._heard
        if heard is None or self._down_since is not None:
            return None
        return Testimony(self.host_id, engine_s=max(time.monotonic() - heard[0], 0.0), daemon_s=heard[1])

    def post(self, key: Key, message: StateMessage, *, unless: Callable[[], bool]) -> None:
        """Send soon; a newer message with the same key takes the place of one that was not sent yet. Dropped if
        `unless()`, which is asked where nobody can `forget` between the answer and the queue."""
        with self._lock:
            if unless():
                return
            self._waiting[key] = message
        self._nudge()

    def forget(self, job: str) -> None:
        """The job has ended: what the peer has not taken yet is of no interest any more. Its engine may know nothing of
        the job, and would answer BUSY for ever."""
        with self._lock:
            for key in [key for key in self._waiting if key[0] == job]:
                del self._waiting[key]

    def stop(self) -> None:
        """End the link; what was not sent is dropped."""
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
        except FlyballError as error:  # not down yet: that is said when no new connection can be made
            log.info("peer_connection_lost", peer=self.host_id, reason=error.message)

    def _serve(self, connection: Connection) -> None:
        """Send what is waiting, and a ping when there is nothing; ends by an exception or by `stop`."""
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        deferred: set[Key] = set()  # the peer said BUSY: it is about to hear of the generation
        retry_s = self._settings.replicate_retry_s
        while not self._thread.stopping:
            sent = self._send_waiting(connection, deferred)
            wait_s = min(retry_s, self._settings.ping_interval_s) if deferred else self._settings.ping_interval_s
            ready = poll.poll(0 if sent else wait_s * 1000)
            if any(descriptor == self._wake for descriptor, _ in ready):
                os.eventfd_read(self._wake)
            elif deferred and not ready and not sent:
                deferred.clear()
                retry_s *= _BUSY_GROWTH
            elif not sent or ready:  # nothing to do, or the connection has an end to tell
                self._exchange(connection, Ping())
            if not deferred and not self._waiting:
                retry_s = self._settings.replicate_retry_s

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
        asked_s = time.monotonic()
        reply = connection.request(message, Reply, timeout_s=self._settings.ping_timeout_s)
        self._heard = (asked_s, reply.daemon_s)
        return reply


class PeerLinks:
    """The links of all jobs of this engine; a peer that two jobs share has one link."""

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
        """Have a link to each of these hosts, and to no other."""
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
        """The job has ended here."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.forget(job)

    def post(self, host_id: str, key: Key, message: StateMessage, *, unless: Callable[[], bool]) -> None:
        """Send to a host that has a link; without one there is nobody to tell. `unless` as for the link: what is true
        before `forget` is called is never queued after it."""
        with self._lock:
            link = self._links.get(host_id)
        if link is not None:
            link.post(key, message, unless=unless)

    def down_s(self, host_id: str) -> float:
        with self._lock:
            link = self._links.get(host_id)
        return 0.0 if link is None else link.down_s

    def unreachable(self) -> tuple[str, ...]:
        """Peers whose connection broke and could not be made again so far."""
        with self._lock:
            return tuple(sorted(host_id for host_id, link in self._links.items() if link.down_s > 0))

    def testimonies(self, hosts: Iterable[str]) -> tuple[Testimony, ...]:
        """Of those of these hosts that answer."""
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
