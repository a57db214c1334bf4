"""Pages of lists, newest page first, and reading the event log from a position on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from flyball.contracts.events import Event, EventKind

DEFAULT_LIMIT = 200
MAX_LIMIT = 500


class Page(msgspec.Struct, frozen=True):
    """The newest `limit` items before the item named `before` ('': no bound) and, where a list supports it, after the
    one named `after`."""

    limit: int = DEFAULT_LIMIT
    before: str = ""
    after: str = ""


class EventLogReader(Protocol):
    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return the first (position, event) pairs after position `after`, in order, of one job or of all. Empty
        `kinds`: every kind. `since`: only from then on, wall clock."""
        ...

    def last(self) -> int:
        """Return the position of the newest event, 0 if there is none."""
        ...


def read_on(
    log: EventLogReader, *, job: str | None, after: int, limit: int, kinds: Collection[EventKind]
) -> tuple[int, list[tuple[int, Event]]]:
    """Return the position that has been read up to, and the next events. Readers of a rare kind thus skip the frequent
    ones only once. A database that was set back or made anew is read on from its newest event."""
    last = log.last()  # read first: events added meanwhile must not count as read
    if last <= after:
        return last, []
    events = log.read(job, after, limit, kinds)
    newest = events[-1][0] if events else after
    return (newest if len(events) == limit else max(last, newest)), events
