"""Ranks in lock step whose hosts' clocks are set or drift while they train, written from a known truth.

The clocks change neither goodput nor the stragglers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate

BASE = 1_000_000.0
START_S = 4.0
JITTER_S = 0.01

Of = Callable[[int, int], float]  # of a rank, at a step, in seconds


class Run:
    """Steps of 1 s. All ranks begin a step once the last one completed the previous step. `late`: how much longer a
    rank then takes. `ahead`: how far its clock is ahead when it logs the step."""

    def __init__(self, ahead: Of, late: Of = lambda rank, step: 0.0, *, ranks: int = 8, steps: int = 300) -> None:
        chance = random.Random(1)
        now = BASE + START_S
        self.late_s = 0.0
        self.events = [
            Event(BASE, EventKind.JOB_SUBMITTED, "job", data={"world_size": ranks}),
            Event(BASE, EventKind.GENERATION_STARTED, "job", 1, data={"restore_step": None}),
        ]
        for step in range(steps):
            now += 1.0
            last = 0.0
            for rank in range(ranks):
                late_s = late(rank, step)
                at = now + late_s - chance.uniform(0.0, JITTER_S) + ahead(rank, step)
                data = {"first_step": step, "completed_at": [at]}
                self.events.append(Event(at, EventKind.STEPS, "job", 1, rank, f"host-{rank}", data=data))
                last = max(last, late_s)
            now += last
            self.late_s += last
        self.elapsed_s = now - BASE
        self.events.append(Event(now, EventKind.JOB_ENDED, "job", data={"outcome": "succeeded"}))
        self.useful_s = float(steps)

    def report(self) -> GoodputReport:
        report = calculate(self.events)
        assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s, abs=1e-6)
        assert report.elapsed_s == pytest.approx(self.elapsed_s, abs=1e-6)
        return report


def of_one(seconds: float, *, rank: int = 3, since: int = 0, until: int = 10**9) -> Of:
    return lambda this, step: seconds if this == rank and since <= step < until else 0.0


@pytest.mark.parametrize("by_s", [0.5, -0.5, 5.0, -5.0, 3600.0])
def test_a_clock_that_is_set_during_training_is_not_a_straggler(by_s: float) -> None:
    run = Run(of_one(by_s, since=150))
    report = run.report()
    assert report.seconds_by_category["straggler"] < 2.0
    assert report.seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=2.0)
    (note,) = [note for note in report.notes if "clock" in note]
    assert "host-3" in note and "steps" in note


@pytest.mark.parametrize("by_s", [0.001, -0.001, 0.005])
def test_a_clock_that_drifts_is_not_a_straggler(by_s: float) -> None:
    run = Run(lambda rank, step: by_s * step if rank == 3 else 0.0, steps=500)
    report = run.report()
    assert report.seconds_by_category["straggler"] < 2.0
    assert report.seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=2.0)
    assert [note for note in report.notes if "clock" in note and "host-3" in note]


def test_a_clock_that_is_always_part_of_a_step_ahead_is_not_a_straggler() -> None:
    report = Run(of_one(0.3)).report()
    assert report.seconds_by_category["straggler"] == 0.0


def test_clocks_that_agree_are_not_mentioned() -> None:
    assert not [note for note in Run(lambda rank, step: 0.0).report().notes if "clock" in note]


@pytest.mark.parametrize("until", [70, 250, 300])
def test_a_rank_that_the_others_wait_for_from_some_step_on_is_a_straggler(until: int) -> None:
    """At the same time another host's clock is set."""
    run = Run(of_one(5.0, since=120), of_one(0.4, rank=5, since=60, until=until))
    report = run.report()
    assert report.seconds_by_category["straggler"] == pytest.approx(run.late_s, abs=3.0)
    assert report.seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=3.0)
    assert report.badput_by_host["host-5"] == pytest.approx(run.late_s, abs=3.0)


def test_two_ranks_with_one_clock_set() -> None:
    run = Run(of_one(0.5, rank=1, since=150), ranks=2)
    assert run.report().seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=2.0)


def test_missing_steps_move_no_clock() -> None:
    """One clock is 100 s ahead, and a third of another rank's steps are missing: the median is then between the two."""
    chance = random.Random(5)
    run = Run(of_one(100.0, rank=1), ranks=3)
    run.events = [event for event in run.events if event.rank != 2 or chance.random() < 0.7]
    assert run.report().seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=2.0)


clocks = st.lists(
    st.tuples(st.floats(-2.0, 2.0), st.floats(-0.002, 0.002), st.integers(1, 299), st.floats(-30.0, 30.0)),
    min_size=2,
    max_size=8,
)
lates = st.dictionaries(st.integers(11, 298), st.tuples(st.integers(0, 7), st.floats(0.3, 8.0)), max_size=12)


@given(clocks, lates)
@settings(max_examples=25, deadline=None)
def test_the_truth_is_recovered_whatever_the_clocks_do(
    clocks: list[tuple[float, float, int, float]], lates: dict[int, tuple[int, float]]
) -> None:
    """Each host's clock has an offset and a drift per step, and is set once. At most a third of the ranks' clocks
    are set at the same moment, because the majority decides which clock is right."""
    ranks = 3 * len(clocks)

    def ahead(rank: int, step: int) -> float:
        if rank >= len(clocks):
            return 0.0
        off_s, drift_s, since, set_by_s = clocks[rank]
        return off_s + drift_s * step + (set_by_s if step >= since else 0.0)

    def late(rank: int, step: int) -> float:
        who, seconds = lates.get(step, (-1, 0.0))
        # A rank that is late exactly when its clock is set is ambiguous: the log is the same.
        unclear = rank < len(clocks) and abs(step - clocks[rank][2]) < 2
        return seconds if who % ranks == rank and who >= 0 and not unclear else 0.0

    run = Run(ahead, late, ranks=ranks)
    report = run.report()
    # A step at which a clock is set is known only to a part of a step.
    assert report.seconds_by_category["straggler"] == pytest.approx(run.late_s, abs=3.0 + 0.1 * run.late_s)
    assert report.seconds_by_category["useful"] == pytest.approx(run.useful_s, abs=3.0 + 0.1 * run.late_s)
