"""A job's time in slices of equal length, each with its seconds by category, for pictures of the run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor

import msgspec

from goodput.account.sweep import Interval

MAX_BINS = 1000


class TimelineBin(msgspec.Struct, frozen=True):
    """A slice of the elapsed time, starting at `at` (wall clock). The seconds of its categories sum to `seconds`."""

    at: float
    seconds: float
    seconds_by_category: Mapping[str, float]


def binned(intervals: Iterable[Interval], start: float, end: float, count: int) -> tuple[TimelineBin, ...]:
    """[start, end] in `count` slices, 1 to MAX_BINS. Intervals are exclusive; gaps between them are in no category."""
    count = max(1, min(count, MAX_BINS))
    length = (end - start) / count
    if not length > 0:
        return ()
    spent: list[dict[str, float]] = [{} for _ in range(count)]
    for interval in intervals:
        left, right = max(interval.start, start), min(interval.end, end)
        if left >= right:
            continue
        first = min(count - 1, floor((left - start) / length))
        last = min(count - 1, floor((right - start) / length))
        for index in range(first, last + 1):
            inside = min(right, start + (index + 1) * length) - max(left, start + index * length)
            if inside > 0:
                of_bin = spent[index]
                of_bin[interval.category] = of_bin.get(interval.category, 0.0) + inside
    return tuple(
        TimelineBin(at=start + index * length, seconds=length, seconds_by_category=of_bin)
        for index, of_bin in enumerate(spent)
    )
