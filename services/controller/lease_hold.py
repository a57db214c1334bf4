"""Holds the lease for one controller, and renews it when due, even in the middle of a long round.

Otherwise a round that takes longer than the lease would be lost to the next controller, whose round takes as long, and
so on forever. Safety comes from the epoch, which every commit checks; the hold only notices a loss early.
"""

from __future__ import annotations

import threading

import structlog

from flyball.contracts.clock import Clock
from services.controller.ports import DecisionStore
from services.rules.stream import LeaseGrant
from services.runtime.outages import OUTAGES

RENEWALS_PER_TTL = 3
LONGEST_ROUND_S = 30.0  # a loop that was not seen for longer hangs: let its lease run out

log = structlog.get_logger(__name__)


class LeaseHold:
    """The loop calls `take` and `confirm`; `keep` runs in a thread of its own. `holder` is "name#incarnation"."""

    def __init__(self, *, store: DecisionStore, clock: Clock, holder: str, ttl_s: float) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._ttl_s = ttl_s
        self._lock = threading.Lock()  # also around requests: of two at once, nobody knows which answer is newer
        self._grant: LeaseGrant | None = None
        self._unbroken_since = -1  # since this epoch no other controller can have led
        self._renew_at_s = 0.0
        self._loop_seen_at_s = 0.0

    @property
    def renewal_s(self) -> float:
        """How often to renew the lease, or to request it while another controller holds it."""
        return self._ttl_s / RENEWALS_PER_TTL

    def take(self) -> LeaseGrant | None:
        """Before a round: take the lease, or renew it if due. None while another controller holds it."""
        with self._lock:
            self._loop_seen_at_s = self._clock.monotonic_s()
            if self._grant is None or self._loop_seen_at_s >= self._renew_at_s:
                self._acquire()
            return self._valid()

    def confirm(self, begun: LeaseGrant) -> LeaseGrant | None:
        """After a round that began under `begun`: the grant to commit it under. None if another controller may have led
        since: then the round's view may be out of date."""
        with self._lock:
            if self._grant is not None and self._clock.monotonic_s() >= self._renew_at_s:
                self._acquire()
            grant = self._valid()
            return grant if grant is not None and self._unbroken_since <= begun.epoch else None

    def drop(self, why: str) -> None:
        """Note that the lease is lost."""
        with self._lock:
            self._drop(why)

    def release(self) -> None:
        """Release the lease, so that another controller need not wait for it to run out."""
        with self._lock:
            if self._grant is None:
                return
            self._drop("stopped")
            try:
                self._store.release_lease(self._holder)
            except OUTAGES as error:
                log.warning("lease_not_released", error=str(error), until=f"it runs out within {self._ttl_s} s")

    def begin_anew(self) -> None:
        """Start a new epoch after the database was set back."""
        with self._lock:
            self._drop("the database was set back: a backup was restored, or a replica promoted")
            self._store.went_back(self._holder)

    def keep(self, stop: threading.Event) -> None:
        """Run until stopped: renew the lease while the loop is in a long round."""
        while not stop.wait(self.renewal_s / 2.0):
            self.keep_on()

    def keep_on(self) -> None:
        """Renew the lease if due. If it has run out, the loop must take it again."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            if self._grant is None or not self._renew_at_s <= now_s < self._grant.valid_until_monotonic_s:
                return
            if now_s - self._loop_seen_at_s > LONGEST_ROUND_S:
                return
            try:
                self._acquire()
            except OUTAGES as error:  # the loop reports it: it needs the same database
                log.debug("lease_not_renewed", error=str(error))

    def _acquire(self) -> None:
        now_s = self._clock.monotonic_s()
        grant = self._store.acquire_lease(self._holder, self._ttl_s)
        if grant is None:
            self._drop("another controller holds the lease")
            return
        if self._grant is None or grant.epoch != self._grant.epoch:
            log.info("leading", epoch=grant.epoch, holder=self._holder)
        # Each change of holder starts an epoch: the next one is ours again only if nobody was in between.
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
