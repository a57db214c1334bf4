"""The straggler watch on generated times: healthy jobs have none, and a slow rank is the one that is named."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flyball.contracts.reports.training_health import RankCompute, Straggler, StragglerRecovered
from services.sensor.detector.straggler_watch import StragglerWatch

Times = Callable[[int, int, random.Random], float]  # (rank, report) -> seconds per step
REPORTS = 60


def even(rank: int, report: int, chance: random.Random) -> float:
    return 0.1 * chance.gauss(1.0, 0.02)


def noisy(rank: int, report: int, chance: random.Random) -> float:
    return 0.01 * chance.lognormvariate(0.0, 0.3)


def uneven(rank: int, report: int, chance: random.Random) -> float:
    """Each rank has its own amount of work, within a tenth."""
    return 0.1 * (1.0 + 0.1 * ((rank * 7) % 5) / 4) * chance.gauss(1.0, 0.02)


def pauses(rank: int, report: int, chance: random.Random) -> float:
    """A rank at a time is held up: by its host, or by logging."""
    return 0.1 * chance.gauss(1.0, 0.02) * (6.0 if chance.random() < 0.1 else 1.0)


def slower_together(rank: int, report: int, chance: random.Random) -> float:
    return 0.1 * (1.0 + report / 20) * chance.gauss(1.0, 0.02)


def stragglers(times: Times, world_size: int, seed: int, *, slow: int = -1, since: int = 0) -> list[Straggler]:
    chance, watch, found = random.Random(seed), StragglerWatch(), []
    for report in range(REPORTS):
        ranks = list(range(world_size))
        chance.shuffle(ranks)
        for rank in ranks:
            factor = 1.5 if rank == slow and report >= since else 1.0
            compute_s = 10 * factor * max(1e-4, times(rank, report, chance))
            found += watch.observe((RankCompute("job", 1, rank, 10, compute_s),), 0.0)
    return [body for body in found if isinstance(body, Straggler)]


@pytest.mark.parametrize("world_size", [2, 3, 8, 32])
@pytest.mark.parametrize("times", [even, noisy, uneven, pauses, slower_together])
def test_healthy_jobs_have_no_straggler(times: Times, world_size: int) -> None:
    for seed in range(20):
        assert not stragglers(times, world_size, seed), seed


@pytest.mark.parametrize("world_size", [2, 3, 8, 32])
@pytest.mark.parametrize("times", [even, uneven, slower_together])
def test_a_rank_that_takes_half_as_long_again_is_named_once(times: Times, world_size: int) -> None:
    for seed in range(10):
        slow = seed % world_size
        (found,) = stragglers(times, world_size, seed, slow=slow, since=seed)
        assert (found.rank, found.ranks, found.windows) == (slow, world_size, 5)
        assert found.compute_s > 1.25 * found.usual_s


def test_a_new_generation_is_measured_anew_and_an_ended_job_forgotten() -> None:
    watch, found = StragglerWatch(), []
    for generation in (1, 2):
        for _ in range(12):
            rows = [RankCompute("job", generation, rank, 10, 2.0 if rank == 1 else 1.0) for rank in range(3)]
            found += watch.observe(rows, 0.0)
    assert [(body.generation, body.rank) for body in found if isinstance(body, Straggler)] == [(1, 1), (2, 1)]
    watch.keep(())
    assert not watch.observe([RankCompute("job", 1, 0, 100, 1.0)], 0.0)


def test_a_rank_that_reports_no_more_is_not_awaited_for_ever() -> None:
    watch, found = StragglerWatch(), []
    watch.observe([RankCompute("job", 1, 3, 10, 1.0)], 0.0)
    for _ in range(60):
        found += watch.observe([RankCompute("job", 1, rank, 10, 2.0 if rank == 1 else 1.0) for rank in range(3)], 0.0)
    (body,) = found
    assert isinstance(body, Straggler) and (body.rank, body.ranks) == (1, 3)


def test_a_straggler_is_named_again_in_time_until_it_is_as_fast_as_the_others() -> None:
    watch, found = StragglerWatch(), []
    for report in range(60):  # one a minute; a window is two reports
        slow = 2.0 if report < 40 else 1.0
        rows = [RankCompute("job", 1, rank, 10, slow if rank == 1 else 1.0) for rank in range(3)]
        found += [(report, type(body)) for body in watch.observe(rows, 60.0 * report)]
    named = [report for report, kind in found if kind is Straggler]
    assert named == [9, 15, 21, 27, 33, 39], "every 300 s, with the end of a window"
    assert [report for report, kind in found if kind is StragglerRecovered] == [49]
