"""Logs with ragged ends: one rank's log stops early, an incident's end is missing, a stamp belongs to nothing."""

from __future__ import annotations

import pytest

from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate


def event(at: float, kind: EventKind, /, *, rank: int = -1, incident: str = "", **data: object) -> Event:
    return Event(at=at, kind=kind, job="gpt", generation=1, rank=rank, incident_id=incident, data=data)


def steps(completed_at: list[float], rank: int = 0, first_step: int = 0) -> Event:
    return event(completed_at[-1], EventKind.STEPS, rank=rank, first_step=first_step, completed_at=completed_at)


def spent(report: GoodputReport) -> dict[str, float]:
    return {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}


def begin() -> list[Event]:
    return [event(0.0, EventKind.JOB_SUBMITTED), event(0.0, EventKind.GENERATION_STARTED)]


def end(at: float) -> Event:
    return event(at, EventKind.JOB_ENDED, outcome="succeeded")


def test_a_rank_whose_log_stops_early_does_not_hide_the_others() -> None:
    times = [float(at) for at in range(1, 501)]
    log = [*begin(), *(steps(times, rank) for rank in range(3)), steps(times[:100], 3), end(500.0)]

    report = calculate(log)

    assert spent(report) == {"useful": 500.0}
    assert any("rank 3 end long before" in note for note in report.notes)


@pytest.mark.parametrize(("ahead", "pace_s"), [(15, 10.0), (200, 0.1)])
def test_a_lost_hosts_last_reports_are_not_a_lost_log(ahead: int, pace_s: float) -> None:
    times = [(step + 1) * pace_s for step in range(100 + ahead)]
    report = calculate([*begin(), steps(times, 0), steps(times[:100], 1), end(times[-1])])

    assert report.steps.newest == 99
    assert not any("end long before" in note for note in report.notes)


def test_an_absurd_step_number_does_not_make_the_others_lost_logs() -> None:
    times = [float(at) for at in range(1, 101)]
    report = calculate([*begin(), steps(times, 0), steps(times, 1), steps([900.0], 1, first_step=10**6), end(900.0)])

    assert report.steps.newest == 99


def test_a_silence_within_a_row_of_many_steps_is_a_pause() -> None:
    rows = [80.0 * row for row in range(1, 11)]
    rows += [at + 600.0 + 80.0 for at in (rows[-1], *(rows[-1] + 80.0 * row for row in range(1, 10)))]
    log = [*begin(), *(steps([at], first_step=10 * place) for place, at in enumerate(rows)), end(rows[-1])]

    assert spent(calculate(log))["unknown"] == pytest.approx(600.0, abs=80.0)


def test_an_outage_shorter_than_ten_steps_is_a_pause_between_long_steps() -> None:
    times = [70.0 * step for step in range(1, 11)]
    times += [times[-1] + 600.0 + 70.0 * step for step in range(1, 11)]

    report = calculate([*begin(), steps(times), end(times[-1])])

    assert spent(report) == {"useful": 1400.0, "unknown": 600.0}


def test_rows_of_many_steps_may_differ_by_a_little() -> None:
    times = [0.0]
    for row in range(20):
        times.append(times[-1] + (100.0 if row < 12 else 105.0))
    log = [*begin(), *(steps([at], first_step=1000 * place) for place, at in enumerate(times[1:])), end(times[-1])]

    assert "unknown" not in spent(calculate(log))


def test_an_incident_whose_end_is_missing_does_not_swallow_later_pauses() -> None:
    times = [float(at) for at in range(1, 11)]
    times += [times[-1] + 20.0 + step for step in range(1, 101)]
    times += [times[-1] + 300.0 + step for step in range(1, 101)]
    log = [*begin(), steps(times), event(12.0, EventKind.INCIDENT_OPENED, incident="i", cause="?"), end(times[-1])]

    assert spent(calculate(log)) == {"useful": 210.0, "detection": 2.0, "decision": 18.0, "unknown": 300.0}


def test_an_incident_that_training_outlives_does_not_end_an_evaluation() -> None:
    times = [float(at) for at in range(1, 11)] + [60.0 + step for step in range(1, 11)]
    log = [
        *begin(),
        steps(times),
        event(10.0, EventKind.PHASE, rank=0, phase="eval"),
        event(20.0, EventKind.INCIDENT_OPENED, incident="i", cause="host_silent"),
        event(25.0, EventKind.INCIDENT_CLOSED, incident="i", state="resolved"),
        event(60.0, EventKind.PHASE, rank=0, phase="step"),
        end(70.0),
    ]

    assert spent(calculate(log)) == {"useful": 20.0, "evaluation": 50.0}


@pytest.mark.parametrize(("stamps", "began_at"), [([20.5], 99.0), ([95.5, 97.5], 95.5), ([20.5, 97.5], 97.5)])
def test_only_a_stamp_shortly_before_an_incident_begins_it(stamps: list[float], began_at: float) -> None:
    log = [
        *begin(),
        steps([float(at) for at in range(1, 100)]),
        *(event(at, EventKind.FAULT_INJECTED, fault="slow") for at in stamps),
        event(99.5, EventKind.INCIDENT_OPENED, incident="i", cause="worker_killed"),
        end(110.0),
    ]

    (incident,) = calculate(log).incidents
    assert incident.began_at == began_at
