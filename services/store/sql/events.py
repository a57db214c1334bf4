"""The event log. Numbers follow the order of commits, so a reader that continues after a number misses nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Row, Select, TextClause, func, insert, select, text, union_all, update

from flyball.contracts.events import Event, EventKind
from services.record.codec import dump, load
from services.store.sql.database import Database
from services.store.sql.set_aside import readable
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
    return head(connection)[0]


def head(connection: Connection) -> tuple[int, int]:
    """Return the revision, and the one of the last change of conditions."""
    revision, conditions = connection.execute(select(log_head.c.revision, log_head.c.conditions_revision)).one()
    return int(revision), int(conditions)


# The numbers of each job's events are read from an index alone.
_NEWEST_OF_JOB = (
    "SELECT number FROM events WHERE job = :job{0} AND kind = :kind AND number > 0 ORDER BY number DESC LIMIT :count"
)


def newest_of_jobs(connection: Connection, jobs: Sequence[str], kind: EventKind, count: int) -> list[Event]:
    """Return up to `count` of the newest events of one kind of each of these jobs, in one statement."""
    if not jobs:
        return []
    given = {f"job{place}": job for place, job in enumerate(jobs)}
    rows = connection.execute(_of_jobs(len(jobs)), given | {"kind": kind.value, "count": count})
    return [event for row in rows if (event := readable("events", "", load, row.document, Event)) is not None]


@lru_cache(maxsize=64)  # the expression language takes longer to build it than the database to answer
def _of_jobs(jobs: int) -> TextClause:
    parts = [f"SELECT number FROM ({_NEWEST_OF_JOB.format(place)}) AS of_job{place}" for place in range(jobs)]
    found = " UNION ALL ".join(parts)
    return text(f"SELECT document FROM events JOIN ({found}) AS found ON found.number = events.number")


_UNREADABLE = Event(at=0.0, kind=EventKind.SIGNAL, data={"kind": "event_unreadable"})


def _readable(rows: Sequence[Row[Any]]) -> list[tuple[int, Event]]:
    """Return the number and the event of each row. One that cannot be decoded shows as such: a reader must get past
    its number."""
    found = ((row.number, readable("events", row.number, load, row.document, Event)) for row in rows)
    return [(number, event or _UNREADABLE) for number, event in found]


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
        with self._db.read() as connection:
            first = max(after, _last_before(connection, since))
            rows = connection.execute(_page(_asked(job, kinds, first, since), limit, newest=False)).all()
        return _readable(rows)

    def history(self, job: str, after: int, limit: int, of_every_job: Collection[EventKind]) -> list[tuple[int, Event]]:
        """Return up to `limit` pairs with number > `after`, oldest first, from the job's first event on: its own, and
        those of no job of these kinds."""
        with self._db.read() as connection:
            if not after:
                first = connection.scalar(select(func.min(events.c.number)).where(events.c.job == job))
                if first is None:
                    return []
                after = first - 1
            asked = [(events.c.number > after, events.c.job == job), *_asked("", of_every_job, after, 0.0)]
            rows = connection.execute(_page(asked, limit, newest=False)).all()
        return _readable(rows)

    def newest(
        self, job: str | None, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return the newest `limit` pairs of what `read` selects, oldest first."""
        with self._db.read() as connection:
            first = _last_before(connection, since)
            rows = connection.execute(_page(_asked(job, kinds, first, since), limit, newest=True)).all()
        return _readable(rows[::-1])

    def last(self) -> int:
        """Return the number of the newest event, 0 if there is none."""
        with self._db.read() as connection:
            return int(connection.execute(select(log_head.c.last_event)).scalar_one())


_Conditions: TypeAlias = tuple[ColumnElement[bool], ...]


def _last_before(connection: Connection, since: float) -> int:
    return last_before(connection, events.c.number, events.c.at, since - DISORDER_S) if since else 0


def _asked(job: str | None, kinds: Collection[EventKind], after: int, since: float) -> list[_Conditions]:
    """Return conditions that together let through what is asked for, and of which each reads an index in the order of
    numbers. One condition for several jobs or kinds would not: the database would sort all that match or, if it
    expects many, look for them in the whole log."""
    common = (events.c.number > after, *((events.c.at >= since,) if since else ()))
    of_jobs: list[_Conditions] = [()] if job is None else [(events.c.job == one,) for one in dict.fromkeys((job, ""))]
    of_kinds: list[_Conditions] = [(events.c.kind == kind.value,) for kind in sorted(set(kinds))] or [()]
    return [(*common, *of_job, *of_kind) for of_job in of_jobs for of_kind in of_kinds]


def _page(asked: Sequence[_Conditions], limit: int, *, newest: bool) -> Select[tuple[int, str]]:
    """Return the query for the first or the newest events that fulfill one of several conditions."""
    order = events.c.number.desc() if newest else events.c.number.asc()
    whole = select(events.c.number, events.c.document)
    if len(asked) == 1:
        return whole.where(*asked[0]).order_by(order).limit(limit)
    parts = [select(events.c.number).where(*one).order_by(order).limit(limit).subquery() for one in asked]
    found = union_all(*(select(part.c.number) for part in parts)).subquery()
    return whole.join(found, found.c.number == events.c.number).order_by(order).limit(limit)
