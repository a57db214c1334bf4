"""The event log, numbered in the order in which its transactions commit, so that who reads on from a number misses
nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, Select, insert, select, update

from flyball.contracts.events import Event, EventKind
from services.record.codec import dump, load
from services.store.sql.database import Database
from services.store.sql.tables import events, log_head


def append(connection: Connection, fresh: Sequence[Event]) -> None:
    """Write events as the last thing of a transaction, also none: that tells readers that something changed.

    The head's row is locked from here to the commit. It is always the last lock that a transaction takes.
    """
    connection.execute(
        update(log_head).values(last_event=log_head.c.last_event + len(fresh), revision=log_head.c.revision + 1)
    )
    if not fresh:
        return
    first = int(connection.execute(select(log_head.c.last_event)).scalar_one()) - len(fresh) + 1
    connection.execute(
        insert(events),
        [
            {"number": number, "at": event.at, "kind": event.kind.value, "job": event.job, "document": dump(event)}
            for number, event in enumerate(fresh, first)
        ],
    )


def revision(connection: Connection) -> int:
    """Grows with every transaction that wrote."""
    return int(connection.execute(select(log_head.c.revision)).scalar_one())


class SqlEventLog:
    """What goodput, the live page and the streams read."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def append(self, fresh: Sequence[Event]) -> None:
        """Add events that come from outside, in the order given."""
        if fresh:
            self._db.transact(lambda connection: append(connection, fresh))

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = ()
    ) -> list[tuple[int, Event]]:
        """Up to `limit` (number, event) pairs with number > `after`, oldest first. With a job: its own events, and
        those that concern no job (a host that joined, a controller that was elected). No `kinds` means all."""
        query = _of(job, kinds).where(events.c.number > after).order_by(events.c.number).limit(limit)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return [(row.number, load(row.document, Event)) for row in rows]

    def newest(self, job: str | None, limit: int, kinds: Collection[EventKind] = ()) -> list[tuple[int, Event]]:
        """The end of what `read` gives: the newest `limit` pairs, oldest first."""
        query = _of(job, kinds).order_by(events.c.number.desc()).limit(limit)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        return [(row.number, load(row.document, Event)) for row in reversed(rows)]

    def last(self) -> int:
        """The number of the newest event, 0 if there is none."""
        with self._db.read() as connection:
            return int(connection.execute(select(log_head.c.last_event)).scalar_one())


def _of(job: str | None, kinds: Collection[EventKind]) -> Select[tuple[int, str]]:
    query = select(events.c.number, events.c.document)
    if job is not None:
        query = query.where(events.c.job.in_((job, "")))
    if kinds:
        query = query.where(events.c.kind.in_([kind.value for kind in kinds]))
    return query
