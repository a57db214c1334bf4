"""The small chart of steps per second on a job's card."""

from __future__ import annotations

import pytest

from flyball.contracts.events import Event, EventKind
from services.dashboard.pace import BINS, SHOWN_S, pace

NOW = 10_000.0


def steps(*completed_at: float, rank: int = -1) -> Event:
    return Event(NOW, EventKind.STEPS, "job", rank=rank, data={"first_step": 0, "completed_at": list(completed_at)})


def test_steps_are_counted_by_when_they_were_completed() -> None:
    found = pace([steps(NOW - 0.5, NOW - 1.0), steps(NOW - SHOWN_S - 1.0), steps(NOW - 15.0), steps(NOW + 1.0)], NOW)
    assert found is not None
    assert found["rates"][-2:] == [pytest.approx(0.1), pytest.approx(0.2)]
    assert sum(found["rates"][:-2]) == 0.0 and len(found["rates"]) == BINS
    assert found["path"].count("M") == 2, "a slice without a step is a gap"


def test_of_ranks_that_report_apart_the_first_counts() -> None:
    found = pace([steps(NOW - 1.0, rank=0), steps(NOW - 1.0, rank=1)], NOW)
    assert found is not None and found["most"] == pytest.approx(0.1)


def test_a_job_without_steps_has_no_chart() -> None:
    assert pace([], NOW) is None
    assert pace([steps(NOW - 2 * SHOWN_S)], NOW) is None
