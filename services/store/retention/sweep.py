"""Keeps the database from growing for ever: every ten minutes, merges or removes what has been over for long enough.

Two processes may sweep at once: each transaction is idempotent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import structlog
from sqlalchemy import Connection, select, update

from flyball.contracts.clock import Clock
from flyball.contracts.events import Event, EventKind
from services.record.audit_records import KEY_KEPT_S
from services.record.codec import dump, load
from services.record.retention_rules import (
    DAY_S,
    SPAN_S,
    Merged,
    RetentionSettings,
    is_prompt_signal,
    merge_steps,
    span_of,
)
from services.runtime.outages import OUTAGES, Outage
from services.store.decisions import order_store
from services.store.retention import removal
from services.store.retention.host_removal import SqlHostRemoval
from services.store.sql.database import Database
from services.store.sql.lease import leader
from services.store.sql.rows import upsert
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import last_before
from services.store.sql.tables import cursors, events

SWEEP_INTERVAL_S = SPAN_S
FIRST_SWEEP_S = 60.0  # leaves a starting supervisor alone
JUMPED_S = DAY_S  # of the wall clock, since this process began: by a wrong clock, all is old
EVENTS_AT_ONCE = 20_000  # event numbers that are processed together
_MERGED, _CLEARED = "retention-merged", "retention-cleared"  # cursors: all events up to there are done
_SET_CLOCK = "set the clock of the database's machine; if it is right now, start the supervisor again"

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
        """Sweep until stopped. Waits out outages of the database, and does nothing while its clock has jumped."""
        outage = Outage("sweeper", self._clock)
        wait_s = FIRST_SWEEP_S
        offset_s = self._clock.wall_s() - self._clock.monotonic_s()
        while not stop.wait(wait_s):
            try:
                jumped_s = self._clock.wall_s() - self._clock.monotonic_s() - offset_s
                if abs(jumped_s) > JUMPED_S:
                    _log.warning("not_swept", clock_jumped_s=round(jumped_s), hint=_SET_CLOCK)
                elif self._leads():
                    self._sweep_until(stop)
                wait_s = SWEEP_INTERVAL_S
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)

    def sweep(self, now: float) -> Iterator[int]:
        """Remove everything that is over at `now` (wall clock). Yields the number of rows that each transaction
        removed. If the caller stops early, the next call continues."""
        ages = self._settings
        detail_before, history_before = now - ages.detail_days * DAY_S, now - ages.history_days * DAY_S
        yield from _merge_step_events(self._db, (now - ages.steps_in_full_s) // SPAN_S * SPAN_S)
        yield from _clear_signal_events(self._db, detail_before)
        yield from removal.remove_details(self._db, detail_before, ages.max_signals)
        yield self._db.transact(partial(order_store.remove_refused, now=now), durable=False)
        yield from removal.remove_audit(self._db, now - ages.audit_days * DAY_S, now - KEY_KEPT_S)
        yield from self._hosts.remove_dead(now - ages.dead_host_days * DAY_S)
        yield from removal.remove_jobs(self._db, history_before)
        yield from removal.remove_what_has_no_job(self._db, history_before)

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


# --- the event log ---------------------------------------------------------------------------------------------------


def _merge_step_events(db: Database, before: float) -> Iterator[int]:
    """Merge the step events written before a moment. Yields the number of rows that each transaction removed."""
    for first, last in _windows(db, _MERGED, before):
        in_window = (events.c.kind == EventKind.STEPS.value, events.c.number.between(first, last))
        with db.read() as connection:
            names = connection.scalars(select(events.c.job).distinct().where(*in_window)).all()
        for job in names:
            with db.read() as connection:
                query = select(events.c.number, events.c.document).where(events.c.job == job, *in_window)
                rows = connection.execute(query.order_by(events.c.number)).all()
            events_of = ((row.number, readable("events", row.number, load, row.document, Event)) for row in rows)
            found = ((number, event) for number, event in events_of if event is not None)
            for _, of_span in groupby(found, key=lambda pair: span_of(pair[1].at)):
                if merged := merge_steps(of_span):
                    yield db.transact(partial(_replace, merged=merged), durable=False)
        _done(db, _MERGED, last)


def _clear_signal_events(db: Database, before: float) -> Iterator[int]:
    """Remove the events of signals written before a moment that had arrived promptly: goodput does not need them."""
    for first, last in _windows(db, _CLEARED, before):
        query = select(events.c.number, events.c.document).where(
            events.c.kind == EventKind.SIGNAL.value, events.c.number.between(first, last)
        )
        with db.read() as connection:
            rows = connection.execute(query).all()
        gone = []
        for row in rows:
            event = readable("events", row.number, load, row.document, Event)
            if event is not None and is_prompt_signal(event):
                gone.append(row.number)
        for start in range(0, len(gone), removal.ROWS_AT_ONCE):
            part = gone[start : start + removal.ROWS_AT_ONCE]
            yield db.transact(partial(removal.remove_keys, table=events, keys=part), durable=False)
        _done(db, _CLEARED, last)


def _replace(connection: Connection, merged: Sequence[Merged]) -> int:
    for one in merged:
        values = {"at": one.event.at, "document": dump(one.event)}
        connection.execute(update(events).where(events.c.number == one.number).values(values))
    return removal.remove_keys(connection, events, [number for one in merged for number in one.gone])


def _windows(db: Database, cursor: str, before: float) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of the numbers of events written before a moment that are not done yet."""
    with db.read() as connection:
        done = connection.scalar(select(cursors.c.position).where(cursors.c.name == cursor)) or 0
        last = last_before(connection, events.c.number, events.c.at, before)
    for first in range(done + 1, last + 1, EVENTS_AT_ONCE):
        yield first, min(first + EVENTS_AT_ONCE - 1, last)


def _done(db: Database, cursor: str, position: int) -> None:
    row = {"name": cursor, "stream": "", "position": position}
    db.transact(lambda connection: upsert(connection, cursors, [row], replace=("position",)), durable=False)
