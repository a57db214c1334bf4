"""However a run is sliced, no second is lost and none is counted twice."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput.account.categories import Category
from goodput.account.sweep import Interval
from goodput.account.timeline_bins import binned

cuts = st.lists(st.floats(0.0, 1e6), min_size=2, max_size=30, unique=True).map(sorted)


@given(cuts=cuts, count=st.integers(1, 60), data=st.data())
def test_slices_sum_to_the_intervals(cuts: list[float], count: int, data: st.DataObject) -> None:
    categories = data.draw(st.lists(st.sampled_from(Category), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
    intervals = [Interval(a, b, c, "") for (a, b), c in zip(pairwise(cuts), categories, strict=True)]
    bins = binned(intervals, cuts[0], cuts[-1], count)
    assert len(bins) == count
    for category in Category:
        expected = math.fsum(i.seconds for i in intervals if i.category is category)
        found = math.fsum(b.seconds_by_category.get(category, 0.0) for b in bins)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for one in bins:
        assert math.fsum(one.seconds_by_category.values()) == pytest.approx(one.seconds, rel=1e-6, abs=1e-6)


def test_a_run_without_time_has_no_slices() -> None:
    assert binned([], 5.0, 5.0, 10) == ()
    assert binned([Interval(1.0, 2.0, Category.USEFUL, "")], 3.0, 5.0, 2)[0].seconds_by_category == {}
