"""Predictions against published results, and against the renewal process itself, simulated step by step."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from flyball.contracts.errors import UsageError
from goodput.predict.prediction import (
    PredictedTier,
    daly_interval_s,
    expected_ettr,
    expected_goodput,
    job_mtti_s,
    optimal_tiers,
    rate_interval,
    tiers_goodput,
    young_interval_s,
)


@pytest.mark.parametrize(
    ("nodes", "rate", "restart_min", "interval_min", "ettr"),
    [
        (2_048, 6.5, 5, 5, 0.93),
        (2_048, 6.5, 5, 60, 0.68),
        (12_500, 2.34, 2, 2, 0.94),
    ],
)
def test_metas_closed_form_gives_the_published_points(
    nodes: int, rate: float, restart_min: float, interval_min: float, ettr: float
) -> None:
    found = expected_ettr(
        nodes=nodes, failures_per_1000_node_days=rate, restart_s=60.0 * restart_min, interval_s=60.0 * interval_min
    )
    assert round(found, 2) == ettr


def test_the_published_time_to_failure_of_a_large_job() -> None:
    # 16,384 GPUs of RSC-1, 8 per node: 1.8 h; 131,072 GPUs: 0.23 h (Kokolis et al.).
    assert job_mtti_s(2_048, 6.5) / 3600 == pytest.approx(1.8, abs=0.01)
    assert job_mtti_s(16_384, 6.5) / 3600 == pytest.approx(0.23, abs=0.01)


def test_metas_form_is_exact_to_first_order() -> None:
    exact = expected_goodput(interval_s=120.0, save_s=0.0, mtti_s=job_mtti_s(2_048, 6.5), repair_s=60.0)
    form = expected_ettr(nodes=2_048, failures_per_1000_node_days=6.5, restart_s=60.0, interval_s=120.0)
    assert form == pytest.approx(exact, abs=1e-3)
    assert expected_ettr(nodes=100_000, failures_per_1000_node_days=6.5, restart_s=600.0, interval_s=600.0) == 0.0
    assert expected_ettr(
        nodes=1, failures_per_1000_node_days=0.0, restart_s=600.0, interval_s=90.0, save_s=10.0
    ) == pytest.approx(0.9)


def test_young_and_daly_by_hand() -> None:
    # save 60 s, one interruption a day: sqrt(2 x 60 x 86,400) = 3,220 s; Daly: x = 60 / 172,800,
    # 3,220.0 x (1 + sqrt(x) / 3 + x / 9) - 60 = 3,180.1 s.
    assert young_interval_s(60.0, 86_400.0) == pytest.approx(3_220.0, abs=0.1)
    assert daly_interval_s(60.0, 86_400.0) == pytest.approx(3_180.1, abs=0.1)
    assert daly_interval_s(200.0, 90.0) == 90.0, "saves that take longer than two interruptions are apart"
    assert (young_interval_s(0.0, 10.0), daly_interval_s(0.0, 10.0)) == (0.0, 0.0)


@pytest.mark.parametrize(("save_s", "mtti_s"), [(1.0, 3_600.0), (60.0, 3_600.0), (600.0, 3_600.0), (0.01, 50.0)])
def test_no_other_interval_is_better_than_dalys(save_s: float, mtti_s: float) -> None:
    def goodput(interval_s: float) -> float:
        return expected_goodput(interval_s=interval_s, save_s=save_s, mtti_s=mtti_s, repair_s=30.0)

    best = max(goodput(daly_interval_s(save_s, mtti_s) * 1.01**n) for n in range(-300, 301))
    assert goodput(daly_interval_s(save_s, mtti_s)) == pytest.approx(best, rel=1e-3)
    assert goodput(young_interval_s(save_s, mtti_s)) <= best


@pytest.mark.parametrize(
    ("interval_s", "save_s", "mtti_s", "repair_s"),
    [(500.0, 10.0, 3_600.0, 300.0), (5.0, 1.0, 40.0, 0.0), (3_000.0, 60.0, 1_800.0, 600.0), (1.0, 0.0, 1_000.0, 20.0)],
)
def test_the_expected_goodput_is_that_of_a_simulated_run(
    interval_s: float, save_s: float, mtti_s: float, repair_s: float
) -> None:
    """Between two failures whole pieces are kept. Failures have no memory, so each begins a new piece."""
    running_s = np.random.default_rng(7).exponential(mtti_s, 200_000)
    pieces = np.floor(running_s / (interval_s + save_s))
    simulated = pieces.sum() * interval_s / (running_s + repair_s).sum()
    expected = expected_goodput(interval_s=interval_s, save_s=save_s, mtti_s=mtti_s, repair_s=repair_s)
    assert expected == pytest.approx(simulated, rel=0.02)


# --- confidence of a rate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668), (10, 4.795, 18.390), (100, 81.364, 121.627)],
)
def test_the_interval_of_a_rate_is_garwoods(count: int, low: float, high: float) -> None:
    found = rate_interval(count, 2.0)
    assert (2.0 * found.low, 2.0 * found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-6)


def test_the_approximation_continues_the_exact_interval() -> None:
    exact, approximate = rate_interval(100, 1.0), rate_interval(101, 1.0)
    assert exact.low < approximate.low < exact.low + 1.5
    assert exact.high < approximate.high < exact.high + 1.5


def test_the_interval_covers_the_rate_as_often_as_promised() -> None:
    counts = np.random.default_rng(3).poisson(4.0, 2_000)
    intervals = {count: rate_interval(int(count), 1.0) for count in set(counts)}
    held = sum(intervals[count].low <= 4.0 <= intervals[count].high for count in counts)
    assert held / len(counts) >= 0.95


# --- tiers -----------------------------------------------------------------------------------------------------------

MEMORY = PredictedTier("memory", save_s=0.05, restore_s=1.0, survives=0.7)
PEER = PredictedTier("peer", save_s=0.2, restore_s=5.0, survives=0.95)
STORE = PredictedTier("persistent", save_s=20.0, restore_s=120.0, survives=1.0, ready_after_s=60.0)


def test_one_tier_gets_dalys_interval() -> None:
    store = PredictedTier("persistent", save_s=20.0, restore_s=120.0, survives=1.0)
    plan = optimal_tiers([store], mtti_s=10_000.0, repair_s=60.0, step_s=1.0)
    steps = round(daly_interval_s(20.0, 10_000.0))
    assert plan.tiers[0].interval_steps == steps
    assert plan.tiers[0].restores_share == 1.0
    assert plan.goodput == pytest.approx(
        expected_goodput(interval_s=float(steps), save_s=20.0, mtti_s=10_000.0, repair_s=180.0)
    )


def test_each_tier_gets_the_interval_for_its_own_failures() -> None:
    plan = optimal_tiers([STORE, MEMORY, PEER], mtti_s=3_600.0, repair_s=20.0, step_s=1.0)
    by_name = {tier.name: tier for tier in plan.tiers}
    assert [tier.name for tier in plan.tiers] == ["persistent", "memory", "peer"]
    assert {n: round(t.restores_share, 6) for n, t in by_name.items()} == {
        "memory": 0.7,
        "peer": 0.25,
        "persistent": 0.05,
    }
    for name, tier, share in (("memory", MEMORY, 0.7), ("peer", PEER, 0.25), ("persistent", STORE, 0.05)):
        assert by_name[name].interval_steps == round(daly_interval_s(tier.save_s, 3_600.0 / share))
    alone = optimal_tiers([STORE], mtti_s=3_600.0, repair_s=20.0, step_s=1.0)
    assert plan.goodput > alone.goodput + 0.1


def test_a_useless_tier_is_left_out() -> None:
    costly = PredictedTier("costly", save_s=40.0, restore_s=100.0, survives=0.5)
    never = PredictedTier("never", save_s=0.0, restore_s=0.0, survives=0.0)
    plan = optimal_tiers([costly, never, STORE], mtti_s=3_600.0, repair_s=20.0, step_s=1.0)
    assert [tier.interval_steps is None for tier in plan.tiers] == [True, True, False]
    assert sum(tier.restores_share for tier in plan.tiers) == 1.0


def test_no_save_begins_before_the_previous_copy_counts() -> None:
    slow = PredictedTier("slow", save_s=0.0, restore_s=1.0, survives=1.0, ready_after_s=90.5)
    assert optimal_tiers([slow], mtti_s=3_600.0, repair_s=0.0, step_s=1.0).tiers[0].interval_steps == 91


def test_the_plan_of_two_tiers_matches_a_simulated_run_and_is_the_best() -> None:
    tiers = [PredictedTier("memory", 0.1, 2.0, 0.8), PredictedTier("persistent", 5.0, 30.0, 1.0)]
    plan = optimal_tiers(tiers, mtti_s=400.0, repair_s=10.0, step_s=1.0)
    steps = [tier.interval_steps or 0 for tier in plan.tiers]
    assert plan.goodput == pytest.approx(simulated(tiers, steps, mtti_s=400.0, repair_s=10.0), abs=0.02)
    for memory in (1, 5, 20, 50):
        for store in (50, 100, 200, 400):
            other = tiers_goodput(tiers, [float(memory), float(store)], mtti_s=400.0, repair_s=10.0)
            assert other <= plan.goodput + 1e-3


def simulated(tiers: list[PredictedTier], intervals: list[int], *, mtti_s: float, repair_s: float) -> float:
    """One-second steps with saves after them; a failure goes back to the newest surviving copy."""
    rng = random.Random(11)
    saved = [0] * len(tiers)
    step, elapsed_s, failure_in_s = 0, 0.0, rng.expovariate(1.0 / mtti_s)
    for _ in range(600_000):
        due = [i for i, n in enumerate(intervals) if (step + 1) % n == 0]
        takes_s = 1.0 + sum(tiers[i].save_s for i in due)
        if takes_s <= failure_in_s:
            failure_in_s -= takes_s
            elapsed_s += takes_s
            step += 1
            for i in due:
                saved[i] = step
            continue
        elapsed_s += failure_in_s + repair_s
        failure_in_s = rng.expovariate(1.0 / mtti_s)
        luck = rng.random()
        survivors = [i for i, tier in enumerate(tiers) if luck < tier.survives]
        source = max(survivors, key=lambda i: (saved[i], -i))
        elapsed_s += tiers[source].restore_s
        step = saved[source]
        saved = [min(at, step) if i in survivors else 0 for i, at in enumerate(saved)]
    return step / elapsed_s


# --- invalid numbers -------------------------------------------------------------------------------------------------


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(UsageError, match="save_s cannot be -1"):
        young_interval_s(-1.0, 10.0)
    with pytest.raises(UsageError, match="mtti_s cannot be nan"):
        daly_interval_s(1.0, math.nan)
    with pytest.raises(UsageError, match="interval_s cannot be 0"):
        expected_goodput(interval_s=0.0, save_s=1.0, mtti_s=1.0, repair_s=1.0)
    with pytest.raises(UsageError, match="at least one node"):
        job_mtti_s(0, 6.5)
    with pytest.raises(UsageError, match="no best interval"):
        job_mtti_s(1, 0.0)
    with pytest.raises(UsageError, match="No tier survives"):
        optimal_tiers([MEMORY], mtti_s=1.0, repair_s=1.0, step_s=1.0)
    with pytest.raises(UsageError, match="memory cannot survive"):
        optimal_tiers([PredictedTier("memory", 1.0, 1.0, 70.0)], mtti_s=1.0, repair_s=1.0, step_s=1.0)
    with pytest.raises(UsageError, match="name of its own"):
        optimal_tiers([STORE, STORE], mtti_s=1.0, repair_s=1.0, step_s=1.0)
    with pytest.raises(UsageError, match="count"):
        rate_interval(-1, 1.0)
    with pytest.raises(UsageError, match="exposure cannot be inf"):
        rate_interval(1, math.inf)
