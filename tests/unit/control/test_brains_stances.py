"""The stance of a job's ranks, from what each of them does."""

from __future__ import annotations

import pytest

from flyball.contracts.cluster import DUE_SLEEP, Activity
from services.sensor.detector.stances import Stance, seen_in, stance_of

ALL = frozenset(range(4))
LOCK, SLEEP, DISK = "futex", "clock_nanosleep", "read"


@pytest.mark.parametrize(
    ("doing", "stance", "ranks"),
    [
        ({}, Stance.WORKING, ALL),
        ({Activity.TRACED: {1}, Activity.STOPPED: {0}}, Stance.ATTENDED, ALL),
        ({Activity.READS_INPUT: {1}}, Stance.ATTENDED, ALL),
        ({Activity.STOPPED: {0, 1, 2}}, Stance.FROZEN, {0, 1, 2}),
        ({Activity.STOPPED: ALL}, Stance.SUSPENDED, ALL),
        ({Activity.IDLE: {0, 1}, Activity.BLOCKED: {2}}, Stance.WORKING, ALL),
        ({Activity.IDLE: {0, 1}, Activity.BLOCKED: {2, 3}}, Stance.BLOCKED, ALL),
        ({Activity.BLOCKED: ALL}, Stance.BLOCKED, ALL),
        ({Activity.IDLE: {0, 1, 2}}, Stance.WORKING, ALL),
        ({Activity.IDLE: {0, 1, 2}, Activity.ACTIVE: {3}}, Stance.WORKING, ALL),
    ],
)
def test_what_they_do_together(doing: dict[Activity, set[int]], stance: Stance, ranks: set[int]) -> None:
    assert stance_of(ALL, doing, {}) == (stance, ranks)


@pytest.mark.parametrize(
    ("places", "awaited"),
    [
        ({LOCK: {1, 2, 3}, SLEEP: {0}}, {0}),
        ({LOCK: {2, 3}, SLEEP: {0}, DISK: {1}}, {0, 1}),
        ({LOCK: {2, 3}, SLEEP: {0, 1}}, {0, 1}),  # of two halves, the one that waits waits for the other
        ({LOCK: {2, 3}, "poll": {0, 1}}, set()),  # both wait
        ({LOCK: {2, 3}, "poll": {0}, SLEEP: {1}}, set()),
        ({LOCK: {1, 2, 3}, "poll": {0}}, {0}),  # most wait, one elsewhere
        ({SLEEP: {1, 2, 3}, LOCK: {0}}, set()),  # most wait for nobody
        ({LOCK: {3}, SLEEP: {0}, DISK: {1}, "nanosleep": {2}}, set()),  # less than half
        ({LOCK: ALL}, set()),
        ({LOCK: {1, 2, 3}, "": {0}}, set()),  # one of them is not known
        ({LOCK: {1, 2, 3}, DUE_SLEEP: {0}}, set()),  # it goes on by itself
        ({LOCK: {2, 3}, SLEEP: {0}, DUE_SLEEP: {1}}, set()),
    ],
)
def test_whom_the_idle_ranks_wait_for(places: dict[str, set[int]], awaited: set[int]) -> None:
    expected = (Stance.STANDS, awaited) if awaited else (Stance.TOGETHER, ALL)
    assert stance_of(ALL, {Activity.IDLE: ALL}, places) == expected


@pytest.mark.parametrize(
    ("doing", "places", "stance", "ranks"),
    [
        ({Activity.IDLE: ALL}, {LOCK: ALL}, Stance.WORKING, ALL),  # they may wait for a rank that is not seen
        ({Activity.IDLE: ALL}, {LOCK: {1, 2, 3}, "poll": {0}}, Stance.WORKING, ALL),  # each in its way
        ({Activity.IDLE: ALL}, {LOCK: {1, 2, 3}, SLEEP: {0}}, Stance.STANDS, {0}),  # this one waits for nobody
        ({Activity.IDLE: {0, 1}, Activity.BLOCKED: {2, 3}}, {LOCK: {0, 1}}, Stance.WORKING, ALL),
        ({Activity.BLOCKED: ALL}, {}, Stance.WORKING, ALL),
        ({Activity.IDLE: {0, 1, 2}, Activity.ACTIVE: {3}}, {LOCK: {0, 1, 2}}, Stance.WORKING, ALL),
        ({Activity.STOPPED: {0}}, {}, Stance.FROZEN, {0}),  # whatever the others do
        ({Activity.STOPPED: ALL}, {}, Stance.SUSPENDED, ALL),
        ({Activity.TRACED: {1}}, {}, Stance.ATTENDED, ALL),
    ],
)
def test_what_they_do_while_other_ranks_of_the_job_are_not_seen(
    doing: dict[Activity, set[int]], places: dict[str, set[int]], stance: Stance, ranks: set[int]
) -> None:
    assert stance_of(ALL, doing, places, sees_all=False) == (stance, ranks)


def test_what_was_seen_names_both_places() -> None:
    seen = seen_in(Stance.STANDS, SLEEP, {SLEEP: {0, 1, 2}, LOCK: {3, 4}, DISK: {5}})
    assert SLEEP in seen and LOCK in seen and DISK not in seen
    assert len({seen_in(stance, "", {}) for stance in Stance if stance is not Stance.STANDS}) == len(Stance) - 1
