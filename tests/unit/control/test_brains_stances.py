"""The stance of a job's ranks, from what each of them does."""

from __future__ import annotations

import pytest

from flyball.contracts.cluster import DUE_SLEEP, Activity
from flyball.contracts.reports.rank_stands import RankStand, Stand
from services.sensor.detector.stances import Stance, seen_in, stance_of

ALL = frozenset(range(4))
LOCK, DRIVER, DISK = "futex", "ioctl", "fsync"


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
        ({LOCK: {1, 2, 3}, DRIVER: {0}}, {0}),
        ({LOCK: {2, 3}, DRIVER: {0}, DISK: {1}}, {0, 1}),
        ({LOCK: {2, 3}, DRIVER: {0, 1}}, {0, 1}),  # of two halves, the one that waits waits for the other
        ({LOCK: {2, 3}, "poll": {0, 1}}, set()),  # both wait
        ({LOCK: {2, 3}, "poll": {0}, DRIVER: {1}}, set()),
        ({DRIVER: {1, 2, 3}, LOCK: {0}}, set()),  # most wait for nobody
        ({LOCK: {3}, DRIVER: {0}, DISK: {1}, "flock": {2}}, set()),  # less than half
        ({LOCK: ALL}, set()),
        ({LOCK: {1, 2, 3}, "": {0}}, set()),  # one of them is not known
        ({LOCK: {1, 2, 3}, DUE_SLEEP: {0}}, set()),  # it goes on by itself
        ({LOCK: {2, 3}, DRIVER: {0}, DUE_SLEEP: {1}}, set()),
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
        ({Activity.IDLE: ALL}, {LOCK: {1, 2, 3}, DRIVER: {0}}, Stance.STANDS, {0}),  # this one waits for nobody
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


def stand(rank: int, kind: Stand, *, awaits: str = "", proof: str = "") -> RankStand:
    return RankStand(rank, kind, awaits=awaits, proof=proof)


WAITING = {rank: stand(rank, Stand.COLLECTIVE) for rank in (1, 2, 3)}


@pytest.mark.parametrize("place", ["poll", "clock_nanosleep", "recvfrom", "wait4", "read"])
def test_one_that_waits_for_something_outside_is_given_the_time_of_a_pause(place: str) -> None:
    assert stance_of(ALL, {Activity.IDLE: ALL}, {LOCK: {1, 2, 3}, place: {0}}) == (Stance.WORLD, {0})


@pytest.mark.parametrize(
    ("of_rank_0", "places", "stance", "ranks"),
    [
        (stand(0, Stand.LOCK), {LOCK: ALL}, Stance.STUCK, ALL),
        (stand(0, Stand.LOCK, awaits="recvfrom"), {LOCK: ALL}, Stance.WORLD, {0}),  # another thread may end it
        (stand(0, Stand.NETWORK), {LOCK: {1, 2, 3}, "poll": {0}}, Stance.WORLD, {0}),
        (stand(0, Stand.COLLECTIVE), {LOCK: {1, 2, 3}, "recvfrom": {0}}, Stance.STANDS, {0}),  # it waits for ranks
        (stand(0, Stand.LOCK, proof="nobody can"), {LOCK: ALL}, Stance.DEAD, {0}),
        (stand(0, Stand.SLEEP), {LOCK: {1, 2, 3}, DUE_SLEEP: {0}}, Stance.WORLD, {0}),
        (stand(0, Stand.CODE), {LOCK: {1, 2, 3}, "recvfrom": {0}}, Stance.WORLD, {0}),  # it ran when it was looked at
        (stand(0, Stand.BLOCKED), {LOCK: {1, 2, 3}, "wait4": {0}}, Stance.WORLD, {0}),
        (stand(0, Stand.CODE), {LOCK: ALL}, Stance.TOGETHER, ALL),
        (stand(0, Stand.LOCK, awaits="unknown"), {LOCK: ALL}, Stance.WORLD, {0}),
    ],
)
def test_where_they_stand_decides_among_the_idle(
    of_rank_0: RankStand, places: dict[str, set[int]], stance: Stance, ranks: set[int]
) -> None:
    assert stance_of(ALL, {Activity.IDLE: ALL}, places, {0: of_rank_0, **WAITING}) == (stance, ranks)


def test_one_that_nothing_can_wake_is_dead_whatever_the_others_do() -> None:
    dead = {2: stand(2, Stand.LOCK, proof="nobody can")}
    assert stance_of(ALL, {Activity.IDLE: {2}, Activity.ACTIVE: {0, 1, 3}}, {LOCK: {2}}, dead) == (Stance.DEAD, {2})
    assert stance_of(ALL, {Activity.IDLE: {2}, Activity.TRACED: {1}}, {LOCK: {2}}, dead) == (Stance.ATTENDED, ALL)


def test_of_those_that_may_wait_for_one_that_is_not_seen_nothing_is_known() -> None:
    known = {0: stand(0, Stand.COLLECTIVE), **WAITING}
    assert stance_of(ALL, {Activity.IDLE: ALL}, {LOCK: ALL}, known, sees_all=False) == (Stance.WORKING, ALL)


def test_what_was_seen_names_both_places() -> None:
    seen = seen_in(Stance.STANDS, DRIVER, {DRIVER: {0, 1, 2}, LOCK: {3, 4}, DISK: {5}})
    assert DRIVER in seen and LOCK in seen and DISK not in seen
    assert len({seen_in(stance, "", {}) for stance in Stance if stance is not Stance.STANDS}) == len(Stance) - 1
