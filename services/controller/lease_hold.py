"""One controller's hold on the lease: renewed when due, also in the middle of a round that outlasts it.

Without that, a round that takes longer than the lease is lost to the next controller, whose round takes as long, and so
on for ever. What protects is the epoch, which the commit of a round checks; the hold only says early that it is over.
"""

from __future__ import annotations

import threading

import structlog

from flyball.contracts.clock import Clock
from services.controller.ports import DecisionStore
from services.rules.stream import LeaseGrant
from services.runtime.loops import OUTAGES

RENEWALS_PER_TTL = 3
LONGEST_ROUND_S = 30.0  # a loop that has not come by for longer hangs: its lease is left to run out

log = structlog.get_logger(__name__)


class LeaseHold:
    """`take` and `confirm` are the loop's, `keep` runs in a thread of its own. `holder` is "name#incarnation"."""

    def __init__(self, *, store: DecisionStore, clock: Clock, holder: str, ttl_s: float) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._ttl_s = ttl_s
        self._lock = threading.Lock()  # also around requests: of two at once nobody knows which answer is the newer
        self._grant: LeaseGrant | None = None
        self._unbroken_since = -1  # the epoch from which on no other controller can have led
        self._renew_at_s = 0.0
        self._loop_seen_at_s = 0.0

    @property
    def renewal_s(self) -> float:
        """How often the lease is renewed, or asked for while another one holds it."""
        return self._ttl_s / RENEWALS_PER_TTL

    def take(self) -> LeaseGrant | None:
        """At the beginning of a round: the lease, taken or renewed if need be; None while another one holds it."""
        with self._lock:
            self._loop_seen_at_s = self._clock.monotonic_s()
            if self._grant is None or self._loop_seen_at_s >= self._renew_at_s:
                self._acquire()
            return self._valid()

    def confirm(self, begun: LeaseGrant) -> LeaseGrant | None:
        """At the end of a round that began under `begun`: what it may be stored under. None if another controller may
        have led since: then the round's view may be out of date."""
        with self._lock:
            if self._grant is not None and self._clock.monotonic_s() >= self._renew_at_s:
                self._acquire()
            grant = self._valid()
            return grant if grant is not None and self._unbroken_since <= begun.epoch else None

    def drop(self, why: str) -> None:
        """The lease is not held any more."""
        with self._lock:
            self._drop(why)

    def release(self) -> None:
        """Give it back, so that another controller need not wait for its end."""
        with self._lock:
            if self._grant is None:
                return
            self._drop("stopped")
            try:
                self._store.release_lease(self._holder)
            except OUTAGES as error:
                log.warning("lease_not_released", error=str(error), until=f"it ends by itself in {self._ttl_s} s")

    def begin_anew(self) -> None:
        """The database is older than it was: what it says next is said under a new epoch."""
        with self._lock:
            self._drop("the database is older than it was: a backup was restored, or a replica promoted")
            self._store.went_back(self._holder)

    def keep(self, stop: threading.Event) -> None:
        """Until stopped: renew for a loop that is in the middle of a long round."""
        while not stop.wait(self.renewal_s / 2.0):
            self.keep_on()

    def keep_on(self) -> None:
        """Renew if due. What ran out already is the loop's to take again."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._grant is None or not self._renew_at_s <= now_s < self._grant.valid_until_monotonic_s:
                return
            if now_s - self._loop_seen_at_s > LONGEST_ROUND_S:
                return
            try:
                self._acquire()
            except OUTAGES as error:  # told by the loop, which needs the same database
                log.debug("lease_not_renewed", error=str(error))

    def _acquire(self) -> None:
        now_s = self._clock.monotonic_s()
        grant = self._store.acquire_lease(self._holder, self._ttl_s)
        if grant is None:
            self._drop("another controller holds the lease")
            return
        if self._grant is None or grant.epoch != self._grant.epoch:
            log.info("leading", epoch=grant.epoch, holder=self._holder)
        # Each holder begins an epoch: the one after ours is ours again only if nobody was in between.
        if self._grant is None or grant.epoch > self._grant.epoch + 1:
            self._unbroken_since = grant.epoch
        self._renew_at_s = now_s + self.renewal_s
        self._grant = grant

    def _valid(self) -> LeaseGrant | None:
        if self._grant is not None and self._clock.monotonic_s() >= self._grant.valid_until_monotonic_s:
            self._drop("the lease ran out before it was renewed")
        return self._grant

    def _drop(self, why: str) -> None:
        if self._grant is not None:
            log.warning("not_leading_any_more", epoch=self._grant.epoch, why=why)
        self._grant = None
