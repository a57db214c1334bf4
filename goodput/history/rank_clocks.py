"""Corrects the clocks of ranks that train in lock step, by the steps they complete together. Pure.

No rank can complete a step before all ranks have done their part, so all ranks log the same event. If a rank logs it
later than the median, either its clock is ahead or the rank was late. It was late only if that had a consequence.
Either the others waited, so their next step took longer. Or the rank did not have to wait in its own next step, and
made up the time. Both are durations measured by one clock, so clock offsets do not affect them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

# Ranks never complete a step at the same instant, and host clocks differ a little. The last rank is a straggler only if
# it is later than the median by this share of a step.
STRAGGLER_SHARE = 0.1
_LEAST_STEPS = 3  # to judge a clock; fewer may simply have been late
_BLOCK_STEPS = 16  # a clock's offset is constant over about this many; within them, single steps show when it was set
_JITTER_FACTOR = 4.0  # of a rank's usual change in lateness from step to step: smaller offsets are noise
_ATTENDANCE = 0.9  # of the ranks: with fewer, the median may be one of other clocks


class RankClock(NamedTuple):
    """A rank's clock was ahead of most ranks' by `least_s` to `most_s` while it logged its steps."""

    rank: int
    host_id: str  # '' if the log does not say
    least_s: float
    most_s: float


class CorrectedClock(NamedTuple):
    """A rank's completion times by the clock of most ranks, and its own clock's offset."""

    steps: dict[int, float]
    least_s: float
    most_s: float


def corrected_clocks(
    by_rank: Mapping[int, Mapping[int, float]], medians: Mapping[int, float], n_ranks: Mapping[int, int]
) -> dict[int, CorrectedClock]:
    """Find the ranks whose clocks differ from most by more than ranks differ within a step.

    `medians`: when the median rank completed each step. `n_ranks`: the number of ranks that logged it.
    """
    most = _ATTENDANCE * max(n_ranks.values(), default=0)
    anchors = sorted(step for step, count in n_ranks.items() if count >= most)
    if 2 * len(anchors) < len(medians):
        anchors = sorted(medians)
    if len(anchors) < _LEAST_STEPS:
        return {}
    pace = _Pace.of(anchors, medians)
    if pace.noise_s <= 0.0:
        return {}
    found = {}
    at_anchor = {step: medians[step] for step in anchors}
    for rank, of_rank in by_rank.items():
        lags = [at - at_anchor[step] for step, at in of_rank.items() if step in at_anchor]
        if len(lags) >= _LEAST_STEPS and (max(lags) > pace.noise_s or min(lags) < -pace.noise_s):
            clock = _corrected(of_rank, at_anchor, pace)
            if clock is not None:
                found[rank] = clock
    return found


class _Pace(NamedTuple):
    """The duration of the world's steps, by the clocks of most ranks."""

    after_s: Mapping[int, float]  # duration of each step after this one; none for the last
    until: Mapping[int, int]  # the step at which those end
    noise_s: float  # normal difference between ranks

    @classmethod
    def of(cls, anchors: Sequence[int], medians: Mapping[int, float]) -> _Pace:
        after_s = {one: (medians[two] - medians[one]) / (two - one) for one, two in pairwise(anchors)}
        return cls(after_s, dict(pairwise(anchors)), STRAGGLER_SHARE * median(after_s.values()))


class _Block(NamedTuple):
    """Consecutive steps, by index: the clock's offset in them, and how long the others' steps take apart from this
    rank's delays."""

    first: int
    end: int
    ahead_s: float
    usual_s: float


def _corrected(of_rank: Mapping[int, float], medians: Mapping[int, float], pace: _Pace) -> CorrectedClock | None:
    """None if the clock agrees with most."""
    steps = sorted(step for step in of_rank if step in medians)
    lags = [of_rank[step] - medians[step] for step in steps]
    usual_s = median(abs(later - lag) for lag, later in pairwise(lags))
    pace = pace._replace(noise_s=max(pace.noise_s, _JITTER_FACTOR * usual_s))
    ahead = [s for block in _blocks(steps, lags, pace) for s in _ahead_s(block, steps, lags, pace)]
    least_s, most_s = min(ahead), max(ahead)
    if max(most_s, -least_s) <= pace.noise_s:
        return None
    right = {step: at - ahead[max(0, bisect_right(steps, step) - 1)] for step, at in of_rank.items()}
    return CorrectedClock(right, least_s, most_s)


def _ahead_s(block: _Block, steps: Sequence[int], lags: Sequence[float], pace: _Pace) -> Iterator[float]:
    """The clock's offset at every step of a block."""
    ahead_s = block.ahead_s
    for place in range(block.first, block.end):
        lag = lags[place]
        if lag < block.ahead_s - pace.noise_s:
            ahead_s = lag  # no rank is early: it completes a step with the others
        elif lag <= block.ahead_s + pace.noise_s:
            ahead_s = block.ahead_s
        elif place == len(steps) - 1:
            ahead_s = max(block.ahead_s, min(ahead_s, lag))  # nothing shows the consequence
        else:
            late_s = _was_late_s(place, steps, lags, block, pace)
            ahead_s = block.ahead_s if lag <= block.ahead_s + late_s + pace.noise_s else lag - late_s
        yield ahead_s


def _was_late_s(place: int, steps: Sequence[int], lags: Sequence[float], block: _Block, pace: _Pace) -> float:
    """The most that the rank can have been late at a step (not its last), judging by the consequences."""
    step = steps[place]
    # A rank as late at the previous step made up nothing then: its clock was set. For the first step this is unknown.
    made_up_s = lags[place] - max(lags[place + 1], lags[max(0, place - 1)])
    after_s = pace.after_s.get(step)
    waited_s = 0.0 if after_s is None else (after_s - block.usual_s) * (pace.until[step] - step)
    return max(made_up_s, waited_s, 0.0)


def _blocks(steps: Sequence[int], lags: Sequence[float], pace: _Pace) -> Iterator[_Block]:
    """Split a rank's steps into blocks. If a rank is later from some step on, and all ranks' steps take longer by
    about as much, the rank itself is late."""
    late_s, before, fastest_s = 0.0, None, math.inf
    ends = [*range(_BLOCK_STEPS, len(steps) - _BLOCK_STEPS // 2, _BLOCK_STEPS), len(steps)]
    for first, end in pairwise([0, *ends]):
        lag_s = median_low(lags[first:end])
        after_s = [pace.after_s[step] for step in steps[first:end] if step in pace.after_s]
        pace_s = median_low(after_s) if after_s else fastest_s
        fastest_s = min(fastest_s, pace_s)
        if before is not None:
            change_s = lag_s - before[0]
            if abs(change_s) > pace.noise_s and (pace_s - before[1]) / change_s >= 0.5:
                late_s += change_s
        late_s = max(0.0, min(late_s, pace_s - fastest_s))
        before = lag_s, pace_s
        yield _Block(first, end, lag_s - late_s, pace_s - late_s)
