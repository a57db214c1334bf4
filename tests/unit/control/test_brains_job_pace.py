"""What a job's pace allows: the bounds of every deadline, one at a time."""

from __future__ import annotations

from math import inf

import pytest

from flyball.contracts.cluster import Phase
from flyball.contracts.reports.rank_columns import CompletedSteps
from services.sensor.detector.job_pace import (
    SAMPLED_RANKS,
    UNATTACHED_IDLE_S,
    WINDOW,
    Alarm,
    FalseAlarmPause,
    JobPace,
    LearnedPace,
)
from services.sensor.detector.patience import PhasePatience, StallSettings, gap_limit_s, limit_s, quantile_of
from services.sensor.detector.stances import Stance

SETTINGS = StallSettings()
ALARM = Alarm(1, (0, 3), 40, 30.0, Stance.STANDS)


def pace(step_s: float = 1.0, steps: int = 200, settings: StallSettings = SETTINGS) -> JobPace:
    """Of a job that is settled."""
    made = JobPace(settings)
    made.attach()
    made.stepped_first(0, step_s)
    made.stepped([step_s * number for number in range(steps + 1)])
    return made


def deadline_s(
    known: JobPace, stance: Stance = Stance.STANDS, phase: Phase = Phase.STEP, stepped: bool = True
) -> float:
    return known.deadline_s(stance, phase, has_stepped=stepped)


@pytest.mark.parametrize(
    ("gaps", "limit"),
    [
        ((2.0,), 2.0),
        ((1.0, 3.0), 2.0 + 6.0 * 1.0),
        ((1.0, 1.0, 4.0), 1.0 + 6.0 * 1.0),
        ((5.0, 1.0, 3.0, 2.0), 2.5 + 6.0 * (1.5 + 0.5 + 0.5 + 2.5) / 4),
        ((1.0,) * 9, 1.0),
    ],
)
def test_a_gap_limit_is_the_median_and_a_multiple_of_the_spread(gaps: tuple[float, ...], limit: float) -> None:
    assert gap_limit_s(gaps, 6.0) == pytest.approx(limit)


def test_quantiles_are_samples() -> None:
    assert quantile_of([], 0.9) == 0.0
    assert quantile_of([7.0], 1.0) == 7.0
    assert quantile_of(range(10, 0, -1), 0.9) == 10
    assert quantile_of(range(10), 0.5) == 5


def test_a_limit_has_a_floor_once_something_was_seen() -> None:
    patience = PhasePatience(unknown_s=600.0, floor_s=30.0, factor=4.0)
    assert [limit_s(patience, seen) for seen in (0.0, 1.0, 7.5, 8.0, 0.5)] == [600.0, 30.0, 30.0, 32.0, 30.0]


def test_settings_change_what_they_name_and_nothing_else() -> None:
    changed = StallSettings(phases={Phase.EVAL: PhasePatience(1.0, 2.0, 3.0)}, stances={Stance.STANDS: 5.0})
    assert changed.phases[Phase.EVAL].factor == 3.0
    assert changed.phases[Phase.DATA] == SETTINGS.phases[Phase.DATA]
    assert (changed.stances[Stance.STANDS], changed.stances[Stance.WORKING]) == (5.0, 1800.0)
    assert Phase.PARKED not in SETTINGS.phases and Stance.ATTENDED not in SETTINGS.stances


def test_each_bound_of_a_step_can_be_the_longest() -> None:
    assert deadline_s(pace()) == 30.0  # the stance's
    assert deadline_s(pace(10.0)) == 80.0  # eight steps
    survivor = pace()
    survivor.survive(Stance.STANDS, 20.0)
    survivor.survive(Stance.STANDS, 9.0)
    assert deadline_s(survivor) == 80.0  # four times the longest pause
    assert deadline_s(pace(0.1, steps=200)) == 60.0  # new: 20 s of training
    assert deadline_s(pace(1.0, steps=99)) == 60.0  # new: 99 steps
    assert deadline_s(pace(1.0, steps=100)) == 30.0


@pytest.mark.parametrize(
    ("survived", "asked", "counts"),
    [
        (Stance.STANDS, Stance.STANDS, True),
        (Stance.STANDS, Stance.TOGETHER, True),
        (Stance.TOGETHER, Stance.STANDS, False),
        (Stance.WORKING, Stance.BLOCKED, False),
        (Stance.WORKING, Stance.WORKING, True),
        (Stance.BLOCKED, Stance.SUSPENDED, True),
    ],
)
def test_a_pause_counts_for_its_stance_and_those_with_more_patience(
    survived: Stance, asked: Stance, counts: bool
) -> None:
    known = pace()
    known.survive(survived, 10_000.0)
    assert (deadline_s(known, asked) == 40_000.0) is counts


def test_frozen_ranks_have_two_steps_within_limits() -> None:
    assert deadline_s(pace(0.5), Stance.FROZEN) == 2.0
    assert deadline_s(pace(3.0), Stance.FROZEN) == 6.0
    assert deadline_s(pace(7.0), Stance.FROZEN) == 10.0
    assert deadline_s(pace(3.0), Stance.FROZEN, stepped=False) == 10.0
    limited = pace(3.0)
    limited.limit_by(4.0)
    assert deadline_s(limited, Stance.FROZEN) == 4.0


def test_a_hang_timeout_is_the_deadline_of_all_but_frozen_and_attended_ranks() -> None:
    known = pace(100.0)
    known.limit_by(45.0)
    assert (deadline_s(known), known.never_overdue_s) == (45.0, 2.0)
    assert deadline_s(known, Stance.ATTENDED) == inf
    assert deadline_s(known, phase=Phase.PARKED) == inf
    known.limit_by(1.5)
    assert known.never_overdue_s == 1.5
    known.limit_by(0.0)
    assert (deadline_s(known), known.never_overdue_s) == (800.0, 2.0)


def test_a_script_that_never_attached_is_overdue_only_if_idle_or_stopped() -> None:
    known = JobPace(SETTINGS)
    start = {stance: deadline_s(known, stance, Phase.STARTING) for stance in Stance}
    assert start[Stance.FROZEN] == 10.0
    assert start[Stance.STANDS] == start[Stance.TOGETHER] == start[Stance.BLOCKED] == UNATTACHED_IDLE_S
    assert start[Stance.WORKING] == start[Stance.SUSPENDED] == start[Stance.ATTENDED] == inf
    known.limit_by(50.0)
    assert deadline_s(known, Stance.TOGETHER, Phase.STARTING) == 50.0
    known.attach()
    known.limit_by(0.0)
    assert deadline_s(known, Stance.TOGETHER, Phase.STARTING) == 600.0


def test_other_phases_are_known_by_their_stays_and_parts_of_a_step_by_steps_too() -> None:
    known = pace(2.0)
    assert deadline_s(known, phase=Phase.EVAL) == 1800.0
    known.stayed(Phase.EVAL, 40.0)
    known.stayed(Phase.EVAL, 10.0)
    assert deadline_s(known, phase=Phase.EVAL) == 160.0
    for _ in range(16):
        known.stayed(Phase.EVAL, 20.0)
    assert deadline_s(known, phase=Phase.EVAL) == 80.0, "the last 16 count"
    assert deadline_s(pace(50.0), phase=Phase.CHECKPOINT) == 400.0
    assert deadline_s(pace(50.0), phase=Phase.EVAL) == 1800.0


def test_the_first_step_of_a_generation_is_known_by_those_before() -> None:
    fresh = JobPace(SETTINGS)
    fresh.attach()
    assert deadline_s(fresh, stepped=False) == 600.0
    fresh.stepped_first(0, 50.0)
    fresh.stepped_first(0, 20.0)
    assert deadline_s(fresh, stepped=False) == 200.0
    fresh.stepped([0.0, 1.0, 2.0, 3.0, 4.0])
    assert fresh.usual_step_s() == 50.0, "four samples do not outweigh the first step"
    fresh.stepped([4.0, 5.0])
    assert fresh.usual_step_s() == 1.0
    fresh.begin(None)
    fresh.stepped_first(0, 20.0)
    assert fresh.usual_step_s() == 20.0, "in the next generation, its own first step counts"


def test_the_newest_steps_are_the_usual_ones() -> None:
    known = pace(1.0, steps=WINDOW)
    known.stepped([3.0 * number for number in range(WINDOW + 1)])
    assert known.usual_step_s() == 3.0
    slow = pace(1.0)
    slow.stepped([0.0, *(9.0 * number for number in range(1, 20))])
    assert slow.usual_step_s() == 1.0, "one slow step in ten changes nothing"


def test_it_advances_within_eight_usual_steps_of_the_newest() -> None:
    known = pace(1.0)
    assert not known.advances(5.0)
    known.advance(4, 5, 100.0)
    known.advance(4, 5, 90.0)
    assert known.advances(108.0) and not known.advances(108.1)
    quick = pace(0.01)
    quick.advance(4, 5, 100.0)
    assert quick.advances(102.0) and not quick.advances(102.1)


@pytest.mark.parametrize(
    ("before", "step", "paused_s", "is_false"),
    [
        (40, 41, 15.0, True),  # half of what the alarm had waited
        (40, 41, 14.9, False),
        (39, 40, 20.0, True),
        (41, 42, 20.0, True),
        (38, 39, 20.0, False),
        (42, 43, 20.0, False),
        (-1, 40, 20.0, False),  # when it began is unknown
    ],
)
def test_a_pause_near_an_alarms_step_shows_that_it_was_false(
    before: int, step: int, paused_s: float, is_false: bool
) -> None:
    known = pace(1.0)
    known.begin(ALARM)
    known.stepped([float(number) for number in range(20)])
    if before >= 0:
        known.advance(-1, before, 1000.0)
    known.advance(before, step, 1000.0 + paused_s + (step - before))
    assert (known.false_alarms == 1) is is_false
    assert (known.disproved is not None) is is_false
    if is_false:
        assert known.disproved == FalseAlarmPause(ALARM, pytest.approx(paused_s))
        assert (known.repeats, known.patience) == (0, 2.0)
        assert deadline_s(known) == pytest.approx(2.0 * max(30.0, 4.0 * paused_s))


@pytest.mark.parametrize("alarm_step", [0, 1])
def test_a_pause_after_the_very_first_step_counts_too(alarm_step: int) -> None:
    known = pace(1.0)
    known.begin(ALARM._replace(step=alarm_step))
    known.advance(-1, 0, 1000.0)
    known.advance(0, 1, 1030.0)
    assert known.false_alarms == 1


def test_a_pause_before_the_first_step_is_measured_against_earlier_first_steps() -> None:
    known = pace(1.0)
    known.stepped_first(0, 10.0)
    known.begin(ALARM)
    known.stepped_first(41, 24.9)
    assert known.false_alarms == 0
    known.stepped_first(43, 60.0)
    assert known.false_alarms == 0, "another step"
    known = pace(1.0)
    known.stepped_first(0, 10.0)
    known.begin(ALARM)
    known.stepped_first(41, 25.0)
    assert known.disproved == FalseAlarmPause(ALARM, 15.0)


def test_an_alarm_about_stopped_processes_is_never_false() -> None:
    known = pace(1.0)
    known.begin(ALARM._replace(stance=Stance.FROZEN))
    known.advance(-1, 40, 1000.0)
    known.advance(40, 41, 9000.0)
    assert known.false_alarms == 0


def test_alarms_at_the_same_step_multiply_patience_until_the_job_is_past_it() -> None:
    known = pace(1.0)
    known.begin(ALARM)
    assert (known.repeats, deadline_s(known)) == (1, 300.0)
    known.begin(ALARM._replace(step=41))
    assert (known.repeats, deadline_s(known)) == (2, 3000.0)
    known.begin(ALARM._replace(step=43))
    assert known.repeats == 1, "further on it is another"
    known.begin(None)
    assert known.repeats == 1
    known.advance(-1, 44, 1000.0)
    assert known.repeats == 1
    known.advance(44, 45, 1001.0)
    assert (known.repeats, deadline_s(known)) == (0, 30.0)


def test_patience_doubles_with_each_false_alarm_six_times() -> None:
    known = JobPace(SETTINGS)
    assert known.recall(LearnedPace(false_alarms=3))
    assert known.patience == 8.0
    assert known.recall(LearnedPace(false_alarms=7))
    assert known.patience == 64.0


def test_another_sensor_continues_with_what_was_learned() -> None:
    known = pace(2.0)
    known.stayed(Phase.EVAL, 40.0)
    known.survive(Stance.TOGETHER, 100.0)
    known.begin(ALARM)
    following = JobPace(SETTINGS)
    assert following.recall(known.learned)
    assert following.learned == known.learned
    for stance in Stance:
        for phase in Phase:
            for stepped in (False, True):
                assert deadline_s(following, stance, phase, stepped) == deadline_s(known, stance, phase, stepped)
    assert not known.recall(LearnedPace()), "it has timed steps itself"
    assert len(known.learned.steps) == 64
    assert known.learned.lasting == LearnedPace(True, 2.0, (), 0, 0.0, *list_of(known.learned)[5:])


def list_of(learned: LearnedPace) -> list[object]:
    return [getattr(learned, name) for name in learned.__struct_fields__]


def test_steps_are_timed_by_a_few_ranks() -> None:
    known = JobPace(SETTINGS)
    everyone = tuple(range(SAMPLED_RANKS + 4))
    known.time_steps(CompletedSteps("j", 1, everyone, 0, ((0.0,) * 12, (2.0,) * 12)), known=everyone[1:])
    assert known.learned.steps == (2.0,) * SAMPLED_RANKS
    known.time_steps(CompletedSteps("j", 1, (0, 1, 9), 2, ((5.0, 6.0, 5.0),)), known=everyone)
    assert known.learned.steps[SAMPLED_RANKS:] == (4.0,), "rank 1 is a sample; 0 and 9 are not"
    known.pauses += 1
    known.time_steps(CompletedSteps("j", 1, (1,), 3, ((90.0,),)), known=everyone)
    known.forget(1)
    known.time_steps(CompletedSteps("j", 1, (1,), 4, ((99.0,),)), known=everyone)
    known.time_steps(CompletedSteps("j", 1, (1,), 6, ((120.0,),)), known=everyone)
    assert len(known.learned.steps) == SAMPLED_RANKS + 1, "a pause, a new rank and a gap say nothing"
