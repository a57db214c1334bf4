"""Events that somebody else's server has not been sent yet, and the position up to which it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from flyball.contracts.events import Event, EventKind
from services.store.read.read_models import SqlReadModels
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog
from services.store.sql.lease import leader
from services.store.sql.rows import upsert
from services.store.sql.set_aside import readable
from services.store.sql.tables import cursors

Json = dict[str, Any]

EVENTS_AT_ONCE = 100
NOTED_EVERY = 1000  # events that are nobody's news: a look reads at most so many again


class UnsentEvents:
    """The stories of events of these kinds, in order. `holder`: of the controller's lease, in this process."""

    cursor: str
    kinds: Sequence[EventKind]

    def __init__(self, db: Database, holder: str) -> None:
        self._db = db
        self._holder = holder
        self._events = SqlEventLog(db)
        self._reads = SqlReadModels(db)

    def leads(self) -> bool:
        """Return whether this process's controller leads: only it sends."""
        with self._db.read() as connection:
            return leader(connection) == self._holder

    def following(self) -> tuple[int, Json] | None:
        """Return the number of the next event to send, and its story; None if there is none. Passes over all others."""
        noted = after = self._position()
        last = self._events.last()  # before the page, so that the page has everything up to there
        while True:
            page = self._events.read(None, after, EVENTS_AT_ONCE, self.kinds)
            for number, event in page:
                # What belongs to it may be unreadable: then it is nobody's news.
                if (story := readable("events", number, self._story, event)) is not None:
                    return number, story
                after = number
            is_end = len(page) < EVENTS_AT_ONCE
            if is_end:
                after = max(after, last)
            if page or after - noted >= NOTED_EVERY:
                self.passed(after)
                noted = after
            if is_end:
                return None

    def passed(self, number: int) -> None:
        """Note that everything up to this event is sent, or need not be."""
        row = {"name": self.cursor, "stream": "events", "position": number}
        self._db.transact(lambda connection: upsert(connection, cursors, [row], maximum=("position",)))

    def _position(self) -> int:
        with self._db.read() as connection:
            known = connection.scalar(select(cursors.c.position).where(cursors.c.name == self.cursor))
        if known is None:  # the first start: what happened before is no news
            known = self._events.last()
            self.passed(known)
        return known

    def _story(self, event: Event) -> Json | None:
        """What is sent about an event; None: nothing."""
        raise NotImplementedError
