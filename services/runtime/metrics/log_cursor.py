"""Reading on in the event log, past what is not wanted as well."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from flyball.contracts.events import Event, EventKind


class EventLogReader(Protocol):
    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = ()
    ) -> list[tuple[int, Event]]:
        """The oldest (position, event) pairs behind `after`, in order, of one job or of all; no `kinds` means all."""
        ...

    def last(self) -> int:
        """The position of the newest event of all, 0 if there is none."""
        ...


def read_on(
    log: EventLogReader, *, job: str | None, after: int, limit: int, kinds: Collection[EventKind]
) -> tuple[int, list[tuple[int, Event]]]:
    """The next events, and the position up to which the log has been looked through: a reader of a rare kind does not
    look through the frequent ones again and again."""
    last = log.last()  # first, so that what is added meanwhile is not taken as seen
    if last <= after:
        return after, []
    events = log.read(job, after, limit, kinds)
    newest = events[-1][0] if events else after
    return (newest if len(events) == limit else max(last, newest)), events
