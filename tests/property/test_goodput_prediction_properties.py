"""Predictions are shares of 1 and no worse for fewer failures, and a recommendation always has a text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput.predict.outlook import Assumptions, outlook
from goodput.predict.prediction import PredictedTier, daly_interval_s, expected_goodput, optimal_tiers, rate_interval
from goodput.predict.recommendation import recommend

seconds = st.floats(1e-3, 1e6)
costs = st.floats(0.0, 1e4)


@given(interval_s=seconds, save_s=costs, mtti_s=seconds, repair_s=costs, factor=st.floats(1.0, 1e3))
def test_goodput_is_a_share_and_grows_with_the_time_between_failures(
    interval_s: float, save_s: float, mtti_s: float, repair_s: float, factor: float
) -> None:
    goodput = expected_goodput(interval_s=interval_s, save_s=save_s, mtti_s=mtti_s, repair_s=repair_s)
    assert 0.0 <= goodput <= 1.0
    seldom = expected_goodput(interval_s=interval_s, save_s=save_s, mtti_s=mtti_s * factor, repair_s=repair_s)
    assert seldom >= goodput - 1e-12


@given(save_s=costs, mtti_s=seconds)
def test_dalys_interval_is_never_negative_and_never_beyond_the_time_between_failures_by_much(
    save_s: float, mtti_s: float
) -> None:
    assert 0.0 <= daly_interval_s(save_s, mtti_s) <= 1.5 * mtti_s


@given(
    survives=st.lists(st.floats(0.0, 1.0), max_size=3),
    save_s=st.lists(costs, min_size=4, max_size=4),
    restore_s=st.lists(costs, min_size=4, max_size=4),
    mtti_s=seconds,
    repair_s=costs,
    step_s=st.floats(1e-2, 1e3),
)
def test_more_tiers_are_never_worse(
    survives: list[float],
    save_s: list[float],
    restore_s: list[float],
    mtti_s: float,
    repair_s: float,
    step_s: float,
) -> None:
    tiers = [PredictedTier(f"t{i}", save_s[i], restore_s[i], share) for i, share in enumerate([1.0, *survives])]
    plan = optimal_tiers(tiers, mtti_s=mtti_s, repair_s=repair_s, step_s=step_s)
    alone = optimal_tiers(tiers[:1], mtti_s=mtti_s, repair_s=repair_s, step_s=step_s)
    assert 0.0 <= alone.goodput <= plan.goodput <= 1.0
    assert math.fsum(tier.restores_share for tier in plan.tiers) == pytest.approx(1.0)


@given(count=st.integers(0, 10_000), exposure=seconds)
def test_the_rate_lies_in_its_interval(count: int, exposure: float) -> None:
    found = rate_interval(count, exposure)
    assert 0.0 <= found.low <= count / exposure < found.high


maybe = st.none() | st.floats(0.0, 1e6)


@given(
    step_s=maybe,
    saved_every_steps=maybe,
    save_blocked_s=maybe,
    interruptions=st.integers(0, 1000),
    running_s=st.floats(0.0, 1e8),
    repair_s=maybe,
    lost_steps=maybe,
)
def test_a_recommendation_always_says_something(
    step_s: float | None,
    saved_every_steps: float | None,
    save_blocked_s: float | None,
    interruptions: int,
    running_s: float,
    repair_s: float | None,
    lost_steps: float | None,
) -> None:
    found = recommend(
        step_s=step_s,
        saved_every_steps=saved_every_steps,
        save_blocked_s=save_blocked_s,
        interruptions=interruptions,
        running_s=running_s,
        repair_s=repair_s,
        lost_steps=lost_steps,
    )
    assert found.text
    assert (found.save_every_steps is None) == bool(found.reason)
    if found.save_every_steps is not None and found.save_every_steps_range is not None:
        low, high = found.save_every_steps_range
        assert 1 <= low <= found.save_every_steps <= high


@given(mtti_s=seconds, repair_s=costs, interval_s=seconds, save_s=costs, step_s=seconds)
def test_an_outlook_is_made_of_shares(
    mtti_s: float, repair_s: float, interval_s: float, save_s: float, step_s: float
) -> None:
    found = outlook(Assumptions(mtti_s, repair_s, interval_s, save_s, step_s))
    for share in (found.ettr, found.goodput, found.goodput_at_best):
        assert share is not None and 0.0 <= share <= 1.0
