"""Measures over a job's intervals and incidents. docs/reference/goodput/measures.md gives each formula. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
    """Quantiles of durations in seconds; None if there are none."""

    median_s: float | None
    p90_s: float | None
    p99_s: float | None
    mean_s: float | None
    count: int


class StepQuantiles(msgspec.Struct, frozen=True):
    """Quantiles of numbers of steps; None if there are none."""

    median: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    count: int


class RollingPoint(msgspec.Struct, frozen=True):
    """Measures over the window that ends at `at` (wall clock), and from the start until then."""

    at: float
    goodput: float
    ettr: float
    cumulative_goodput: float


class WindowedEttr(msgspec.Struct, frozen=True):
    """ETTR over a sliding window; a window longer than the elapsed time covers all of it."""

    window_s: float
    min: float
    median: float
    last: float


class Productivity(msgspec.Struct, frozen=True):
    """ML productivity goodput as Google defines it: overall = scheduling x runtime x program. None if the log or the
    options do not have enough data."""

    scheduling: float | None  # share of the time in which the job had all its hosts
    runtime: float | None  # the share of that time that became training
    program: float | None  # the share of training time needed at the hardware's peak, or by the reference
    overall: float | None


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The value below which this share of the sorted values lies, with linear interpolation."""
    if not ascending:
        return None
    place = share * (len(ascending) - 1)
    below = floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Quantiles of durations, ignoring None."""
    return Quantiles(*_quantiles(values))


def step_quantiles(values: Iterable[float | None]) -> StepQuantiles:
    """Quantiles of numbers of steps, ignoring None."""
    return StepQuantiles(*_quantiles(values))


def _quantiles(values: Iterable[float | None]) -> tuple[float | None, float | None, float | None, float | None, int]:
    known = sorted(value for value in values if value is not None)
    mean = fsum(known) / len(known) if known else None
    return quantile(known, 0.5), quantile(known, 0.9), quantile(known, 0.99), mean, len(known)


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None if `whole` is 0."""
    return part / whole if whole > 0 else None


class _Spent:
    """The time spent in some categories up to any moment. Neighbouring intervals that both count, or both do not,
    are merged."""

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
        """The moments at which time begins to count, or ceases to."""
        return (start for start, counts in zip(self._starts, self._counts, strict=True) if counts is to)

    def by(self, moment: float) -> float:
        """Seconds from the start until `moment`."""
        return self._at(bisect_right(self._starts, moment) - 1, moment)

    def by_each(self, moments: Iterable[float]) -> Iterator[float]:
        """`by` for many ascending moments, in one pass."""
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


class _MachineTime:
    """The intervals moved together over the gaps between them, in which nobody ran the job, and the way back."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals: list[Interval] = []
        self._from: list[float] = []  # machine time from which on each shift holds
        self._shifts: list[float] = []
        shift, end = 0.0, intervals[0].start
        for interval in intervals:
            if interval.start > end or not self._from:
                shift += interval.start - end
                self._from.append(interval.start - shift)
                self._shifts.append(shift)
            end = interval.end
            self.intervals.append(
                interval._replace(start=interval.start - shift, end=end - shift) if shift else interval
            )

    def wall(self, moment: float) -> float:
        return moment + self._shifts[max(0, bisect_left(self._from, moment) - 1)]


def rolling(
    intervals: Sequence[Interval], window_s: float, *, points: int = ROLLING_POINTS
) -> tuple[tuple[RollingPoint, ...], WindowedEttr | None]:
    """Goodput and ETTR over a sliding window, at evenly spaced moments.

    A window that would begin before the job begins with it. The smallest ETTR is exact, over whole windows only.
    """
    if not intervals:
        return (), None
    clock = _MachineTime(intervals)
    intervals = clock.intervals
    start, end = intervals[0].start, intervals[-1].end
    useful, productive = _Spent(intervals, (Category.USEFUL,)), _Spent(intervals, PRODUCTIVE)

    def share(spent: _Spent, since: float, until: float) -> float:
        return min(1.0, (spent.by(until) - spent.by(since)) / (until - since)) if until > since else 0.0

    moments = [start + (end - start) * place / points for place in range(1, points)]
    found = tuple(
        RollingPoint(
            at=clock.wall(at),
            goodput=share(useful, max(start, at - window_s), at),
            ettr=share(productive, max(start, at - window_s), at),
            cumulative_goodput=share(useful, start, at),
        )
        for at in (*moments, end)
    )
    first = min(start + window_s, end)
    late = [point.ettr for point, at in zip(found, (*moments, end), strict=True) if at >= first]
    whole = late or [share(productive, max(start, end - window_s), end)]
    lows = _low_windows(productive, first, end, first - start)
    return found, WindowedEttr(window_s, min(chain(lows, whole)), median(whole), whole[-1])


def _low_windows(productive: _Spent, first: float, end: float, window_s: float) -> Iterator[float]:
    """ETTR of the windows ending in [first, end] that can be the smallest.

    ETTR rises from a window that ends where time begins to count, or begins where it ceases to; the first and last
    windows are candidates, too.
    """
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
    """MFU while the job trains, and Google's program goodput: the MFU, or without FLOPs the reference step time over
    the time per kept step."""
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
