"""The event log. Numbers follow the order of commits, so a reader that continues after a number misses nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, Select, insert, select, update

from flyball.contracts.events import Event, EventKind
from services.record.codec import dump, load
from services.store.sql.database import Database
from services.store.sql.shared_reads import DISORDER_S, last_before
from services.store.sql.tables import events, log_head


def append(connection: Connection, fresh: Sequence[Event]) -> None:
    """Append events at the end of a transaction; even none, to let readers see that something changed.

    Locks the head's row until the commit. It is always the last lock that a transaction takes.
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
    """Return a number that grows with every transaction that called `append`."""
    return int(connection.execute(select(log_head.c.revision)).scalar_one())


class SqlEventLog:
    """The log for goodput, the live page and the event streams."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def append(self, fresh: Sequence[Event]) -> None:
        """Append events from outside, in the order given."""
        if fresh:
            self._db.transact(lambda connection: append(connection, fresh))

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return up to `limit` (number, event) pairs with number > `after`, oldest first. With a job: its own events
        and those of no job, such as a joined host or an elected controller. Empty `kinds`: every kind."""
        query = _of(job, kinds).where(events.c.number > after).order_by(events.c.number).limit(limit)
        with self._db.read() as connection:
            query = _since(connection, query, since)
            rows = connection.execute(query).all()
        return [(row.number, load(row.document, Event)) for row in rows]

    def newest(
        self, job: str | None, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return the newest `limit` pairs of what `read` selects, oldest first."""
        query = _of(job, kinds).order_by(events.c.number.desc()).limit(limit)
        with self._db.read() as connection:
            query = _since(connection, query, since)
            rows = connection.execute(query).all()
        return [(row.number, load(row.document, Event)) for row in reversed(rows)]

    def last(self) -> int:
        """Return the number of the newest event, 0 if there is none."""
        with self._db.read() as connection:
            return int(connection.execute(select(log_head.c.last_event)).scalar_one())


def _since(connection: Connection, query: Select[tuple[int, str]], since: float) -> Select[tuple[int, str]]:
    if not since:
        return query
    first = last_before(connection, events.c.number, events.c.at, since - DISORDER_S)
    return query.where(events.c.number > first, events.c.at >= since)


def _of(job: str | None, kinds: Collection[EventKind]) -> Select[tuple[int, str]]:
    query = select(events.c.number, events.c.document)
    if job is not None:
        query = query.where(events.c.job.in_((job, "")))
    if kinds:
        query = query.where(events.c.kind.in_([kind.value for kind in kinds]))
    return query
