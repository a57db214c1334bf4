"""A job that ended and was submitted again: the time in between is nobody's. What --fresh threw away does not count."""

from __future__ import annotations

import pytest

from flyball.contracts.events import Event, EventKind
from goodput.account.options import AccountOptions
from goodput.calculator import GoodputReport, analyse, calculate

HOURS = 36_000.0


def event(at: float, kind: EventKind, generation: int = -1, **data: object) -> Event:
    return Event(at=at, kind=kind, job="job", generation=generation, data=data)


def run(at: float, generation: int, first_step: int, *, outcome: str = "", **submitted: object) -> list[Event]:
    """Ten steps of a second, from two seconds after its submission on; then, with an outcome, an end a second later."""
    completed = [at + 2 + step for step in range(10)]
    steps = Event(
        at=completed[-1],
        kind=EventKind.STEPS,
        job="job",
        generation=generation,
        rank=0,
        data={"first_step": first_step, "completed_at": completed},
    )
    ended = [event(at + 12, EventKind.JOB_ENDED, outcome=outcome)] if outcome else []
    started = event(at + 1, EventKind.GENERATION_STARTED, generation, restore_step=first_step - 1)
    return [event(at, EventKind.JOB_SUBMITTED, world_size=1, **submitted), started, steps, *ended]


def check(report: GoodputReport) -> None:
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s)
    assert sum(report.badput_s.values()) == pytest.approx(report.elapsed_s - report.seconds_by_category["useful"])


def test_hours_in_which_nobody_ran_it_are_not_machine_time() -> None:
    first, second = run(100.0, 0, 0, outcome="stopped"), run(100.0 + HOURS, 1, 10, outcome="succeeded")
    report = calculate([*first, *second])
    alone = calculate(first)
    check(report)
    assert report.not_running_s == HOURS - 12.0 and report.elapsed_s == pytest.approx(24.0)
    assert report.ended_at - report.started_at == HOURS + 12.0
    assert report.goodput == pytest.approx(alone.goodput, abs=0.05)
    assert report.seconds_by_category["shutdown"] == pytest.approx(2 * alone.seconds_by_category["shutdown"])
    assert report.seconds_by_category["scheduling"] == pytest.approx(2.0)
    assert report.ettr_window is not None and report.ettr_window.median > 0.5
    assert report.rolling[-1].at == report.ended_at


def test_a_job_that_waits_for_its_next_start_is_scheduled() -> None:
    events = [*run(100.0, 0, 0, outcome="failed"), event(200.0, EventKind.JOB_SUBMITTED, world_size=1)]
    report = calculate(events, now=205.0)
    check(report)
    assert (report.outcome, report.not_running_s) == ("", 88.0)
    assert report.seconds_by_category["scheduling"] == pytest.approx(6.0)


def test_a_part_of_the_time_counts_its_part_of_the_break() -> None:
    events = [*run(100.0, 0, 0, outcome="stopped"), *run(100.0 + HOURS, 1, 10, outcome="succeeded")]
    report = calculate(events, options=AccountOptions(from_at=50.0 + HOURS))
    check(report)
    assert report.not_running_s == 50.0 and report.elapsed_s == pytest.approx(12.0)


def test_a_run_from_scratch_begins_a_new_account() -> None:
    thrown_away = run(100.0, 0, 0, outcome="failed")
    thrown_away.append(Event(at=110.0, kind=EventKind.INCIDENT_OPENED, job="job", incident_id="inc-1", data={}))
    afresh = run(500.0, 1, 0, outcome="succeeded", first_generation=1)
    both = analyse([*afresh, *thrown_away])
    assert both.report == calculate(afresh)
    assert both.report.not_running_s == 0.0 and both.report.steps.kept == 10
