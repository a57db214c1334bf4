"""The event log: merges step events, and removes those of signals that goodput does not ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from sqlalchemy import Connection, func, select, update

from flyball.contracts.events import Event, EventKind
from services.record.codec import dump, load
from services.record.retention_rules import Merged, is_prompt_signal, merge_steps, span_of
from services.store.retention.removal import ROWS_AT_ONCE, remove_keys
from services.store.sql.database import Database
from services.store.sql.tables import cursors, events
from services.store.sql.upsert import upsert

EVENTS_AT_ONCE = 20_000  # numbers that are looked at together
_MERGED, _CLEARED = "retention-merged", "retention-cleared"  # cursors: all events up to there are done


def merge_step_events(db: Database, before: float) -> Iterator[int]:
    """Merge the step events that were written before a moment; yields the rows that each transaction removed."""
    for first, last in _windows(db, _MERGED, before):
        in_window = (events.c.kind == EventKind.STEPS.value, events.c.number.between(first, last))
        with db.read() as connection:
            names = connection.scalars(select(events.c.job).distinct().where(*in_window)).all()
        for job in names:
            with db.read() as connection:
                query = select(events.c.number, events.c.document).where(events.c.job == job, *in_window)
                rows = connection.execute(query.order_by(events.c.number)).all()
            found = ((row.number, load(row.document, Event)) for row in rows)
            for _, of_span in groupby(found, key=lambda pair: span_of(pair[1].at)):
                if merged := merge_steps(of_span):
                    yield db.transact(partial(_replace, merged=merged), durable=False)
        _done(db, _MERGED, last)


def clear_signal_events(db: Database, before: float) -> Iterator[int]:
    """Remove the events of signals that were written before a moment and had been heard at once."""
    for first, last in _windows(db, _CLEARED, before):
        query = select(events.c.number, events.c.document).where(
            events.c.kind == EventKind.SIGNAL.value, events.c.number.between(first, last)
        )
        with db.read() as connection:
            rows = connection.execute(query).all()
        gone = [row.number for row in rows if is_prompt_signal(load(row.document, Event))]
        for start in range(0, len(gone), ROWS_AT_ONCE):
            part = gone[start : start + ROWS_AT_ONCE]
            yield db.transact(partial(remove_keys, table=events, keys=part), durable=False)
        _done(db, _CLEARED, last)


def _replace(connection: Connection, merged: Sequence[Merged]) -> int:
    for one in merged:
        values = {"at": one.event.at, "document": dump(one.event)}
        connection.execute(update(events).where(events.c.number == one.number).values(values))
    return remove_keys(connection, events, [number for one in merged for number in one.gone])


def _windows(db: Database, cursor: str, before: float) -> Iterator[tuple[int, int]]:
    """Ranges (first, last) of the numbers of events that were written before a moment, and are not done."""
    with db.read() as connection:
        done = connection.scalar(select(cursors.c.position).where(cursors.c.name == cursor)) or 0
        last = _last_before(connection, before)
    for first in range(done + 1, last + 1, EVENTS_AT_ONCE):
        yield first, min(first + EVENTS_AT_ONCE - 1, last)


def _last_before(connection: Connection, before: float) -> int:
    """The number of the last event that was written before a moment, 0 for none. Times grow with the numbers, but for
    a few seconds: which side of the moment those fall on does not matter."""
    low, high = 0, connection.scalar(select(func.max(events.c.number))) or 0
    while low < high:
        middle = (low + high + 1) // 2
        query = select(events.c.number, events.c.at).where(events.c.number >= middle).order_by(events.c.number)
        number, at = connection.execute(query.limit(1)).one()
        low, high = (number, high) if at < before else (low, middle - 1)
    return low


def _done(db: Database, cursor: str, position: int) -> None:
    row = {"name": cursor, "stream": "", "position": position}
    db.transact(lambda connection: upsert(connection, cursors, [row], replace=("position",)), durable=False)
