"""The clocks of ranks that train in lock step, set right by the steps that they complete together. Pure.

No rank can complete a step before all have done their part of it, so every step is an event that all tell of. What a
rank tells of it later than the median does is its clock's, or the rank was late itself. It was late only where that had
a consequence: the others' next step took longer, since they waited for it, or the rank made it up in its own next
step, in which it waited for nobody. Both are durations, each by one clock: what a clock is ahead does not count there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

# Ranks never complete a step in the same instant, and their hosts' clocks differ by a little: the last is a straggler
# only if it comes this share of a step after the median.
STRAGGLER_SHARE = 0.1
_LEAST_STEPS = 3  # that tell of a clock; fewer may have been late by themselves
_BLOCK_STEPS = 16  # over about so many a clock stands still; where it was set within them, single steps tell
_JITTER_FACTOR = 4.0  # by so much of what a rank's lateness changes by from step to step, clocks say nothing
_ATTENDANCE = 0.9  # of the ranks: a median of fewer may be that of other clocks


class RankClock(NamedTuple):
    """A rank's clock was ahead of most ranks' by `least_s` to `most_s` while it told of its steps."""

    rank: int
    host_id: str  # '' where the log does not say
    least_s: float
    most_s: float


class SetRight(NamedTuple):
    """When a rank completed its steps by the clock of most, and what its own was ahead."""

    steps: dict[int, float]
    least_s: float
    most_s: float


def set_right(
    by_rank: Mapping[int, Mapping[int, float]], medians: Mapping[int, float], told_by: Mapping[int, int]
) -> dict[int, SetRight]:
    """The ranks whose clocks differ from those of most by more than ranks do in a step. `medians`: when the median of
    the ranks completed a step; `told_by`: how many of them told of it."""
    most = _ATTENDANCE * max(told_by.values(), default=0)
    anchors = sorted(step for step, count in told_by.items() if count >= most)
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
            clock = _set_right(of_rank, at_anchor, pace)
            if clock is not None:
                found[rank] = clock
    return found


class _Pace(NamedTuple):
    """What the steps of the world take, by the clocks of most ranks."""

    after_s: Mapping[int, float]  # what each step after this one took; none for the last
    until: Mapping[int, int]  # the step that ends them
    noise_s: float  # what ranks differ by

    @classmethod
    def of(cls, anchors: Sequence[int], medians: Mapping[int, float]) -> _Pace:
        after_s = {one: (medians[two] - medians[one]) / (two - one) for one, two in pairwise(anchors)}
        return cls(after_s, dict(pairwise(anchors)), STRAGGLER_SHARE * median(after_s.values()))


class _Block(NamedTuple):
    """Neighbouring steps, by their places: how far the clock is ahead in them, and what the others' steps then take,
    were it not for this rank."""

    first: int
    end: int
    ahead_s: float
    usual_s: float


def _set_right(of_rank: Mapping[int, float], medians: Mapping[int, float], pace: _Pace) -> SetRight | None:
    """None for a clock that is one of most."""
    steps = sorted(step for step in of_rank if step in medians)
    lags = [of_rank[step] - medians[step] for step in steps]
    usual_s = median(abs(later - lag) for lag, later in pairwise(lags))
    pace = pace._replace(noise_s=max(pace.noise_s, _JITTER_FACTOR * usual_s))
    ahead = [s for block in _blocks(steps, lags, pace) for s in _ahead_s(block, steps, lags, pace)]
    least_s, most_s = min(ahead), max(ahead)
    if max(most_s, -least_s) <= pace.noise_s:
        return None
    right = {step: at - ahead[max(0, bisect_right(steps, step) - 1)] for step, at in of_rank.items()}
    return SetRight(right, least_s, most_s)


def _ahead_s(block: _Block, steps: Sequence[int], lags: Sequence[float], pace: _Pace) -> Iterator[float]:
    """How far the clock was ahead at every step of a block."""
    ahead_s = block.ahead_s
    for place in range(block.first, block.end):
        lag = lags[place]
        if lag < block.ahead_s - pace.noise_s:
            ahead_s = lag  # no rank is early: it completes a step with the others
        elif lag <= block.ahead_s + pace.noise_s:
            ahead_s = block.ahead_s
        elif place == len(steps) - 1:
            ahead_s = max(block.ahead_s, min(ahead_s, lag))  # nothing tells what came of it
        else:
            late_s = _was_late_s(place, steps, lags, block, pace)
            ahead_s = block.ahead_s if lag <= block.ahead_s + late_s + pace.noise_s else lag - late_s
        yield ahead_s


def _was_late_s(place: int, steps: Sequence[int], lags: Sequence[float], block: _Block, pace: _Pace) -> float:
    """By how much the rank can have been late at a step, which is not its last, for all that came of it."""
    step = steps[place]
    # One that was as late at the step before made nothing up then: its clock was set. Of the first nobody knows.
    made_up_s = lags[place] - max(lags[place + 1], lags[max(0, place - 1)])
    after_s = pace.after_s.get(step)
    waited_s = 0.0 if after_s is None else (after_s - block.usual_s) * (pace.until[step] - step)
    return max(made_up_s, waited_s, 0.0)


def _blocks(steps: Sequence[int], lags: Sequence[float], pace: _Pace) -> Iterator[_Block]:
    """A rank that is later from some step on, while the steps of all take longer by about as much, is late itself."""
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
