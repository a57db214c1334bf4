"""Reading on in the event log: no wanted event is missed, and unwanted ones are skipped only once."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from services.runtime.paging import read_on

KINDS = (EventKind.STEPS, EventKind.DECISION, EventKind.SIGNAL)


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[int, Event]] = []
        self.read_after: list[int] = []

    def add(self, kind: EventKind) -> None:
        self.events.append((len(self.events) + 1, Event(at=0.0, kind=kind)))

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = ()
    ) -> list[tuple[int, Event]]:
        self.read_after.append(after)
        wanted = [(n, e) for n, e in self.events if n > after and (not kinds or e.kind in kinds)]
        return wanted[:limit]

    def last(self) -> int:
        return len(self.events)


@given(
    batches=st.lists(st.lists(st.sampled_from(KINDS), max_size=8), max_size=8),
    kinds=st.sets(st.sampled_from(KINDS)),
    limit=st.integers(1, 4),
)
def test_every_wanted_event_is_seen_once_and_in_order(
    batches: list[list[EventKind]], kinds: set[EventKind], limit: int
) -> None:
    log, after, seen = Log(), 0, []
    for batch in [*batches, *[[]] * sum(map(len, batches))]:
        for kind in batch:
            log.add(kind)
        after, events = read_on(log, job=None, after=after, limit=limit, kinds=kinds)
        seen += [n for n, _ in events]
    assert seen == [n for n, e in log.events if not kinds or e.kind in kinds]
    assert after == log.last()


def test_a_log_without_news_is_not_read() -> None:
    log = Log()
    for _ in range(5):
        log.add(EventKind.STEPS)
    after, _ = read_on(log, job=None, after=0, limit=10, kinds={EventKind.DECISION})
    assert read_on(log, job=None, after=after, limit=10, kinds={EventKind.DECISION}) == (5, [])
    assert log.read_after == [0]


def test_a_log_that_was_set_back_is_read_on_from_its_end() -> None:
    """Else nobody would see its events until there are as many as before."""
    log = Log()
    for _ in range(3):
        log.add(EventKind.DECISION)
    after, events = read_on(log, job=None, after=1000, limit=10, kinds=())
    assert (after, events) == (3, [])
    log.add(EventKind.DECISION)
    assert [position for position, _ in read_on(log, job=None, after=after, limit=10, kinds=())[1]] == [4]
