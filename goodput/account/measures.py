"""Measures over a job's intervals and incidents; docs/goodput.md gives each formula with its source. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import floor, fsum
from statistics import median

import msgspec

from goodput.account.categories import PRODUCTIVE, WITHOUT_HOSTS, Category
from goodput.account.sweep import Interval

ROLLING_POINTS = 500
SECONDS_PER_HOUR = 3600.0


class Quantiles(msgspec.Struct, frozen=True):
    """Of durations, in seconds; None where there are none."""

    median_s: float | None
    p90_s: float | None
    p99_s: float | None
    mean_s: float | None
    count: int


class StepQuantiles(msgspec.Struct, frozen=True):
    """Of numbers of steps; None where there are none."""

    median: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    count: int


class RollingPoint(msgspec.Struct, frozen=True):
    """Measures over the window that ends at `at` (wall clock), and from the beginning until then."""

    at: float
    goodput: float
    ettr: float
    cumulative_goodput: float


class WindowedEttr(msgspec.Struct, frozen=True):
    """ETTR over a sliding window; one that is longer than the time there is is all of it."""

    window_s: float
    min: float
    median: float
    last: float


class Productivity(msgspec.Struct, frozen=True):
    """ML productivity goodput as Google defines it: overall = scheduling x runtime x program. None where the log, or
    who asks, does not say enough."""

    scheduling: float | None  # share of the time in which the job had all that it needs
    runtime: float | None  # of that time, the share that became training
    program: float | None  # of the training time, the share that the hardware would take at its peak, or the reference
    overall: float | None


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The value below which a share of the sorted values lies, between two of them by linear interpolation."""
    if not ascending:
        return None
    place = share * (len(ascending) - 1)
    below = floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Of durations, those that are None left out."""
    return Quantiles(*_quantiles(values))


def step_quantiles(values: Iterable[float | None]) -> StepQuantiles:
    """Of numbers of steps, those that are None left out."""
    return StepQuantiles(*_quantiles(values))


def _quantiles(values: Iterable[float | None]) -> tuple[float | None, float | None, float | None, float | None, int]:
    known = sorted(value for value in values if value is not None)
    mean = fsum(known) / len(known) if known else None
    return quantile(known, 0.5), quantile(known, 0.9), quantile(known, 0.99), mean, len(known)


def ratio(part: float, whole: float) -> float | None:
    """None of nothing."""
    return part / whole if whole > 0 else None


class _Spent:
    """How much time some categories had taken by any moment. Neighbours that both count, or both do not, are one."""

    def __init__(self, intervals: Sequence[Interval], categories: Iterable[Category]) -> None:
        counted = frozenset(categories)
        self._starts: list[float] = []
        self._counts: list[bool] = []
        for interval in intervals:
            counts = interval.category in counted
            if not self._counts or self._counts[-1] is not counts:
                self._starts.append(interval.start)
                self._counts.append(counts)
        edges = pairwise((*self._starts, intervals[-1].end))
        spent = (end - start if counts else 0.0 for (start, end), counts in zip(edges, self._counts, strict=True))
        self._before = [0.0, *accumulate(spent)]

    def changes(self, *, to: bool) -> Iterator[float]:
        """The moments from which on time counts, or no longer does."""
        return (start for start, counts in zip(self._starts, self._counts, strict=True) if counts is to)

    def by(self, moment: float) -> float:
        """From the beginning until `moment`, seconds."""
        return self._at(bisect_right(self._starts, moment) - 1, moment)

    def by_each(self, moments: Iterable[float]) -> Iterator[float]:
        """`by` of many moments that never fall, in one pass."""
        place, last = -1, len(self._starts) - 1
        for moment in moments:
            while place < last and self._starts[place + 1] <= moment:
                place += 1
            yield self._at(place, moment)

    def _at(self, place: int, moment: float) -> float:
        if place < 0:
            return 0.0
        within = moment - self._starts[place] if self._counts[place] else 0.0
        return min(self._before[place] + within, self._before[place + 1])


def rolling(
    intervals: Sequence[Interval], window_s: float, *, points: int = ROLLING_POINTS
) -> tuple[tuple[RollingPoint, ...], WindowedEttr | None]:
    """Goodput and ETTR over a sliding window, at moments that lie evenly in the time. A window that would begin before
    the time does begins with it; the smallest ETTR is over whole windows, and exact."""
    if not intervals:
        return (), None
    start, end = intervals[0].start, intervals[-1].end
    useful, productive = _Spent(intervals, (Category.USEFUL,)), _Spent(intervals, PRODUCTIVE)

    def share(spent: _Spent, since: float, until: float) -> float:
        return min(1.0, (spent.by(until) - spent.by(since)) / (until - since)) if until > since else 0.0

    moments = [start + (end - start) * place / points for place in range(1, points)]
    found = tuple(
        RollingPoint(
            at=at,
            goodput=share(useful, max(start, at - window_s), at),
            ettr=share(productive, max(start, at - window_s), at),
            cumulative_goodput=share(useful, start, at),
        )
        for at in (*moments, end)
    )
    first = min(start + window_s, end)
    whole = [point.ettr for point in found if point.at >= first] or [share(productive, max(start, end - window_s), end)]
    lows = _low_windows(productive, first, end, first - start)
    return found, WindowedEttr(window_s, min(chain(lows, whole)), median(whole), whole[-1])


def _low_windows(productive: _Spent, first: float, end: float, window_s: float) -> Iterator[float]:
    """ETTR of windows that end in [first, end], of all those in which it can be smallest: it rises from one that ends
    where time begins to count, or begins where it no longer does, or is the first or the last."""
    turns = (*productive.changes(to=True), *(moment + window_s for moment in productive.changes(to=False)))
    ends = [first, *(at for at in sorted(turns) if first < at < end), end]
    begins = [at - window_s for at in ends]
    spent = zip(begins, ends, productive.by_each(begins), productive.by_each(ends), strict=True)
    return (min(1.0, (by_end - by_begin) / (at - begin)) for begin, at, by_begin, by_end in spent if begin < at)


def program_goodput(
    *,
    kept_steps: int,
    useful_s: float,
    gpus: int | None,
    model_flops_per_step: float | None,
    peak_flops_per_gpu: float | None,
    reference_step_s: float | None,
) -> tuple[float | None, float | None]:
    """MFU while the job trains, and Google's program goodput: the MFU, or where no FLOPs are given the reference step
    time over the time that a kept step took."""
    mfu = None
    if kept_steps and useful_s > 0 and gpus and model_flops_per_step and peak_flops_per_gpu:
        mfu = kept_steps * model_flops_per_step / (useful_s * gpus * peak_flops_per_gpu)
    if mfu is None and reference_step_s and kept_steps and useful_s > 0:
        return None, kept_steps * reference_step_s / useful_s
    return mfu, mfu


def productivity(seconds: Mapping[str, float], elapsed_s: float, program: float | None) -> Productivity:
    """The three goodputs and their product, from the seconds by category."""
    available_s = elapsed_s - fsum(seconds[category] for category in WITHOUT_HOSTS)
    scheduling = ratio(available_s, elapsed_s)
    runtime = ratio(seconds[Category.USEFUL], available_s)
    known = scheduling is not None and runtime is not None and program is not None
    return Productivity(
        scheduling=scheduling,
        runtime=runtime,
        program=program,
        overall=scheduling * runtime * program if known else None,  # type: ignore[operator]
    )
