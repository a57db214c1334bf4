"""Keeps the database from growing for ever: what is over for long enough is merged or removed, every ten minutes.

Two processes may sweep at once: each transaction replaces rows by what they come to, whoever does it first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import structlog

from flyball.contracts.clock import Clock
from services.record.retention_rules import DAY_S, SPAN_S, RetentionSettings
from services.runtime.loops import OUTAGES, Outage
from services.store.retention import details, jobs, log
from services.store.retention.hosts import SqlHostRemoval
from services.store.sql.database import Database
from services.store.sql.lease import leader

SWEEP_INTERVAL_S = SPAN_S
FIRST_SWEEP_S = 60.0  # a supervisor that starts has enough to do

_log = structlog.get_logger(__name__)


class Sweeper:
    """Sweeps while the controller `holder` leads."""

    def __init__(self, db: Database, settings: RetentionSettings, clock: Clock, holder: str) -> None:
        self._db = db
        self._settings = settings
        self._clock = clock
        self._holder = holder
        self._hosts = SqlHostRemoval(db)

    def run(self, stop: threading.Event) -> None:
        """Until stopped. A database that is away is tried again."""
        outage = Outage("sweeper", self._clock)
        wait_s = FIRST_SWEEP_S
        while not stop.wait(wait_s):
            try:
                if self._leads():
                    self._sweep_until(stop)
                wait_s = SWEEP_INTERVAL_S
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)

    def sweep(self, now: float) -> Iterator[int]:
        """Remove all that is over at `now` (wall clock); yields the rows that each transaction removed. Who stops in
        the middle goes on with the next call."""
        ages = self._settings
        detail_before, history_before = now - ages.detail_days * DAY_S, now - ages.history_days * DAY_S
        yield from log.merge_step_events(self._db, (now - ages.steps_in_full_s) // SPAN_S * SPAN_S)
        yield from log.clear_signal_events(self._db, detail_before)
        yield from details.remove_details(self._db, detail_before, ages.max_signals)
        yield self._hosts.remove_dead(now - ages.dead_host_days * DAY_S)
        yield from jobs.remove_jobs(self._db, history_before)
        yield from jobs.remove_events_of_no_job(self._db, history_before)

    def _leads(self) -> bool:
        with self._db.read() as connection:
            return leader(connection) == self._holder

    def _sweep_until(self, stop: threading.Event) -> None:
        began_s, removed = self._clock.monotonic_s(), 0
        for rows in self.sweep(self._clock.wall_s()):
            removed += rows
            if stop.is_set():
                return
        if removed:
            _log.info("swept", rows=removed, seconds=round(self._clock.monotonic_s() - began_s, 3))
