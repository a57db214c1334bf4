"""When each rank last moved before its first step: the least delayed report decides."""

from __future__ import annotations

from flyball.contracts.cluster import Phase
from flyball.contracts.reports.rank_columns import RankProgress
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.watched_job import WatchedJob


def followed(*reports: tuple[float, tuple[int, ...], tuple[float, ...]]) -> list[float]:
    """When each of two ranks, first seen in step 5 at 99.0, moved, after reports of (now_s, steps, ages)."""
    job = WatchedJob("job", StallSettings())
    job.begin(1)
    for now_s, steps, ages_s in ((99.0, (5, 5), (0.0, 0.0)), *reports):
        job.observe("a", (0, 1), RankProgress((Phase.STEP,), steps, ages_s), (), now_s, 0.0)
    return job.hosts["a"].moved_s


def test_a_late_report_does_not_make_a_rank_that_rests_move() -> None:
    assert followed((100.5, (5, 5), (1.0, 1.0))) == [99.0, 99.0]


def test_a_less_delayed_report_corrects_when_a_rank_moved() -> None:
    assert followed((100.5, (5, 5), (1.0, 1.75)), (101.5, (5, 5), (2.75, 2.75))) == [98.75, 98.75]


def test_a_beacon_that_grew_younger_moved_within_its_step() -> None:
    assert followed((100.5, (5, 5), (1.5, 1.5)), (101.0, (5, 5), (0.25, 2.0))) == [100.75, 99.0]


def test_ranks_move_with_their_steps_together_or_apart() -> None:
    assert followed((100.5, (6, 6), (0.5, 0.25))) == [100.0, 100.25]
    assert followed((100.5, (5, 6), (1.0, 1.0))) == [99.0, 99.5]
    assert followed((100.5, (5, 6), (1.5, 0.25)), (101.5, (5, 7), (2.5, 1.0))) == [99.0, 100.5]
