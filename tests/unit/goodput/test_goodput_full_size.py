"""Jobs that ran with more or fewer ranks than their full size: every second can be checked by hand."""

from __future__ import annotations

import pytest

from flyball.contracts.events import Event, EventKind
from goodput.calculator import AccountOptions, calculate


def event(at: float, kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **data) -> Event:
    return Event(at, kind, "gpt", generation, rank, "", incident, data)


def begin(generation: int, at: float, /, *, incident: str = "", **data) -> list[Event]:
    """A generation that can train at once. (0.0 would mean: not reached.)"""
    started = event(at, EventKind.GENERATION_STARTED, generation=generation, incident=incident, **data)
    return [started, event(at, EventKind.RANK_MARKS, generation=generation, rank=0, restored_at=at or 1e-6)]


def steps(generation: int, first_step: int, *completed_at: float) -> Event:
    data = {"first_step": first_step, "completed_at": list(completed_at)}
    return event(completed_at[-1], EventKind.STEPS, generation=generation, rank=0, **data)


def end(at: float) -> Event:
    return event(at, EventKind.JOB_ENDED, outcome="succeeded")


def test_a_shrunk_job_counts_by_its_share_of_ranks() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED, world_size=4),
            *begin(1, 0.0, world_size=4),
            steps(1, 0, 1.0, 2.0, 3.0, 4.0),
            event(4.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent", host_id="host-b"),
            event(4.0, EventKind.DECISION, incident="inc-1", kind="shrink"),
            *begin(2, 5.0, restore_step=3, incident="inc-1", world_size=3),
            event(8.0, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved"),
            steps(2, 4, 6.0, 7.0, 8.0, 9.0),
            event(9.0, EventKind.DECISION, kind="grow"),
            *begin(3, 10.0, restore_step=7, world_size=4),
            steps(3, 8, 11.0, 12.0),
            end(12.0),
        ],
        options=AccountOptions(gpu_hour_price=3.6),
    )
    spent = {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}
    assert spent == {"useful": 9.0, "reduced_capacity": 1.0, "stop": 2.0}
    row = next(row for row in report.losses if row.category == "reduced_capacity")
    assert (row.incident_id, row.host_id, row.failure_class) == ("inc-1", "host-b", "host")
    # Four GPUs for twelve seconds; the missing one for four of them.
    assert report.gpus == 4
    assert report.gpu_hours == pytest.approx(4 * 12 / 3600)
    assert row.gpu_hours == pytest.approx(1 * 4 / 3600)
    assert row.cost == pytest.approx(3.6 * 4 / 3600)
    assert report.cost == pytest.approx(3.6 * 48 / 3600)


def test_the_longer_steps_of_a_short_shrink_are_no_warm_up() -> None:
    """Half of the ranks take twice as long for a step."""
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED, world_size=4),
            *begin(1, 0.0, world_size=4),
            steps(1, 0, *range(10, 110, 10)),
            *begin(2, 100.0, restore_step=9, world_size=2),
            steps(2, 10, *range(120, 320, 20)),
            *begin(3, 300.0, restore_step=19, world_size=4),
            steps(3, 20, *range(310, 410, 10)),
            end(400.0),
        ]
    )
    spent = {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}
    assert spent == {"useful": 300.0, "reduced_capacity": 100.0}


@pytest.mark.parametrize(
    ("submitted", "full", "reduced_s", "gpus", "note"),
    [
        ({"world_size": 2}, {}, 0.0, 2, "grew beyond its full size of 2 ranks"),
        ({"world_size": 2}, {"full_world_size": 4}, 2.0, 4, ""),
        ({}, {}, 2.0, 4, "does not say the job's full size"),
    ],
)
def test_the_full_size_of_a_job_that_grew_is_its_submitted_size(
    submitted: dict[str, int], full: dict[str, int], reduced_s: float, gpus: int, note: str
) -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED, **submitted),
            *begin(1, 0.0, world_size=2, **full),
            steps(1, 0, 1.0, 2.0, 3.0, 4.0),
            *begin(2, 4.0, restore_step=3, world_size=4, **full),
            steps(2, 4, 5.0, 6.0),
            end(6.0),
        ]
    )
    assert report.seconds_by_category["reduced_capacity"] == pytest.approx(reduced_s)
    assert report.gpus == gpus
    assert (note in " ".join(report.notes)) if note else report.notes == ()
