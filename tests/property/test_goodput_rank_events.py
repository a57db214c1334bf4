"""One event for several ranks of a host means the same to goodput as an event per rank."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind, per_rank, summed_up
from flyball.contracts.wire import decode, encode
from goodput.calculator import calculate
from goodput.history.job_history import build

MARKS = (
    "spawned_at",
    "attached_at",
    "restore_began_at",
    "restored_at",
    "first_step_at",
    "save_blocked_s",
    "data_wait_s",
)
moments = st.one_of(st.just(0.0), st.floats(1.0, 100.0))


@st.composite
def reported_events(draw: st.DrawFn) -> list[list[Event]]:
    """Per report: events of one kind, host and generation, in any order of ranks."""
    reports = []
    for _ in range(draw(st.integers(1, 8))):
        generation, host, sent_at = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.floats(1.0, 100.0))
        kind = draw(st.sampled_from([EventKind.RANK_MARKS, EventKind.RESTORED]))
        events = []
        for rank in draw(st.lists(st.integers(4 * host, 4 * host + 3), min_size=1, unique=True)):
            data: dict[str, str | int | float]
            if kind is EventKind.RANK_MARKS:
                at, data = sent_at, {name: draw(moments) for name in MARKS}
            else:
                at = draw(st.floats(1.0, 100.0))
                data = {"step": draw(st.integers(-1, 50)), "source_tier": "peer", "source_host": "b", "size_bytes": 7}
            events.append(Event(at, kind, "job", generation, rank, f"host-{host}", data=data))
        reports.append(events)
    return reports


@settings(max_examples=300, deadline=None)
@given(reported_events())
def test_one_event_per_report_equals_one_per_rank(reports: list[list[Event]]) -> None:
    rank_by_rank = [event for events in reports for event in events]
    steps = [
        Event(110.0, EventKind.STEPS, "job", generation, rank, data={"first_step": 3, "completed_at": [101.0, 105.0]})
        for generation, rank in sorted({(event.generation, event.rank) for event in rank_by_rank})
    ]
    stored = [decode(encode(summed_up(events)), Event) for events in reports]
    assert len(stored) == len(reports)
    assert [one for event in stored for one in per_rank(event)] == rank_by_rank
    assert build(stored + steps) == build(rank_by_rank + steps)
    assert calculate(stored + steps) == calculate(rank_by_rank + steps)


def test_lists_of_unequal_length_are_read_as_far_as_possible() -> None:
    data = {"ranks": [0, "one", 2.0, float("nan"), 4], "at": [5.0, 6.0, "seven"], "step": [1, 2], "seconds": 3.0}
    found = per_rank(Event(9.0, EventKind.RESTORED, "job", 1, data=data))
    assert [(event.rank, event.at, dict(event.data)) for event in found] == [
        (0, 5.0, {"step": 1}),
        (2, 9.0, {}),
        (4, 9.0, {}),
    ]
    grouped = defaultdict(list, {"ranks": [1]})
    other = Event(9.0, EventKind.SIGNAL, "job", data=grouped)
    assert [*per_rank(other)] == [other]
