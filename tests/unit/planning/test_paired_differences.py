"""Student's t intervals, of values and of paired differences."""

from __future__ import annotations

import math

import pytest

from simulator.planning import paired


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423), (200, 1.9719)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert paired.t_quantile(degrees) == pytest.approx(expected, abs=1e-4)


def test_pairs_tell_apart_what_single_runs_do_not() -> None:
    a, b = [0.80, 0.85, 0.90, 0.95], [0.81, 0.86, 0.912, 0.959]
    assert paired.estimate(a).high > paired.estimate(b).low
    found = paired.difference(a, b)
    assert found.mean == pytest.approx(0.01025)
    assert found.excludes_zero
    assert found.low == pytest.approx(0.01025 - 3.1824 * 0.00125831 / 2, abs=1e-6)


def test_one_seed_is_never_sure() -> None:
    found = paired.difference([0.5], [0.9])
    assert (found.low, found.high, found.excludes_zero) == (None, None, False)


def test_an_infinite_value_has_no_interval() -> None:
    """The cost of a useful hour of which there was none."""
    found = paired.estimate([1.0, math.inf])
    assert (found.mean, found.low, found.high, found.excludes_zero) == (math.inf, None, None, True)
    assert not paired.difference([math.inf, 1.0], [1.0, math.inf]).excludes_zero
    assert not paired.difference([math.inf, 1.0], [math.inf, 2.0]).excludes_zero
    assert not paired.estimate([math.inf]).excludes_zero


def test_how_many_seeds_would_show_a_difference() -> None:
    found = paired.estimate([-1.0, 3.0, -1.0, 3.0])
    assert not found.excludes_zero
    wanted = paired.seeds_to_see(found)
    assert wanted is not None
    assert 10 < wanted < 60
    assert paired.seeds_to_see(paired.estimate([-1.0, 1.0])) is None
