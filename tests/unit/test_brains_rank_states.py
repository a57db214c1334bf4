"""Ranks of a host that are followed together: when each last moved, as the least delayed report tells."""

from __future__ import annotations

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.reports.rank_columns import RankProgress, Workers
from services.sensor.detector.job_pace import JobPace
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_states import Rank, RanksInSteps, WatchedJob


def followed(*reports: tuple[float, tuple[int, ...], tuple[float, ...]]) -> list[float]:
    """When each of two ranks, seen in step 5 at 99.0, moved after (now_s, steps, ages) of these reports."""
    ranks = [Rank("a", RankStatus("job", 1, n, 10 + n, Phase.STEP, 5, 0.0), 99.0) for n in range(2)]
    together = RanksInSteps(WatchedJob(JobPace(StallSettings())), Workers("job", 1, (0, 1), (10, 11)), ranks)
    for now_s, steps, ages_s in reports:
        together.follow(RankProgress((Phase.STEP,), steps, ages_s), now_s)
    together.settle()
    return [rank.moved_s for rank in ranks]


def test_a_late_report_does_not_make_a_rank_that_rests_move() -> None:
    assert followed((100.5, (5, 5), (1.0, 1.0))) == [99.0, 99.0]


def test_a_report_that_was_less_late_tells_better_when_a_rank_moved() -> None:
    assert followed((100.5, (5, 5), (1.0, 1.75)), (101.5, (5, 5), (2.75, 2.75))) == [98.75, 98.75]


def test_a_beacon_that_grew_younger_moved_within_its_step() -> None:
    assert followed((100.5, (5, 5), (1.5, 1.5)), (101.0, (5, 5), (0.25, 2.0))) == [100.75, 99.0]


def test_ranks_move_with_their_steps_together_or_apart() -> None:
    assert followed((100.5, (6, 6), (0.5, 0.25))) == [100.0, 100.25]
    assert followed((100.5, (5, 6), (1.0, 1.0))) == [99.0, 99.5]
    assert followed((100.5, (6, 6), (0.5, 0.25)), (101.5, (6, 7), (1.0, 1.0))) == [100.0, 100.5]
