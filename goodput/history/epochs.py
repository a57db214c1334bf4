"""Turns step numbers that start over with each epoch into numbers through the whole run. Pure.

Scripts of Lightning and Hugging Face may number batches per epoch. If numbers start over without a sign of a failure,
an epoch ended and no step is recomputed. The caller supplies the signs of a failure; after one, the numbers belong to a
restart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import median_low
from typing import NamedTuple

_LEAST_STEPS = 3  # of an epoch: smaller falls are lines that arrived late
# Between two epochs lie a step, the start of the data loaders, and perhaps an evaluation. A longer silence means a
# failure, unless several epochs ended with the same number.
_PAUSE_STEPS = 3.0
_PAUSE_S = 5.0


class StepReport(NamedTuple):
    """A step's number as it was logged."""

    at: float
    number: int


class Epochs:
    """Maps logged step numbers to numbers through the run. One reporter's numbers say where epochs began; other
    reporters' numbers belong to the nearest of them."""

    def __init__(self, steps: Sequence[StepReport], starts: Sequence[int], added: Sequence[int], restarts: int) -> None:
        self.starts = tuple(starts)  # of all epochs up to the newest: the offset of its numbers
        self.count = len(set(added))
        self.restarts = restarts  # that went back to a first number, and are assumed to repeat the newest epoch
        self.first, self.last = steps[0].number, steps[-1].number
        self._at = [step.at for step in steps]
        self._added = added
        self._offsets: dict[int, list[tuple[float, int]]] = {}  # number -> when it was logged, with its offset
        for step, offset in zip(steps, added, strict=True):
            self._offsets.setdefault(step.number, []).append((step.at, offset))

    def number(self, step: StepReport) -> int:
        """The number through the run of a step completed at that time."""
        offsets = self._offsets.get(step.number)
        if offsets is None:
            return step.number + self._added[max(0, bisect_right(self._at, step.at) - 1)]
        place = bisect_left(offsets, (step.at, 0))
        _, offset = min(offsets[max(0, place - 1) : place + 1], key=lambda logged: abs(logged[0] - step.at))
        return step.number + offset

    def number_before(self, step: StepReport) -> int:
        """The same for a step completed earlier: one that was saved or restored."""
        offsets = self._offsets.get(step.number, [])
        place = bisect_right(offsets, step.at, key=lambda logged: logged[0])
        return step.number + offsets[place - 1][1] if place else self.number(step)


def epochs_in(reports: Iterable[StepReport], *, restarts: Sequence[float] | None = None) -> Epochs | None:
    """Find the epochs in one reporter's steps; None if its numbers never start over.

    `restarts`: times of signs of a restart, ascending; a long silence counts as another sign. None: there certainly was
    no restart.
    """
    steps = _in_order(reports)
    rises = [two.number - one.number for one, two in pairwise(steps) if two.number > one.number]
    if len(rises) == len(steps) - 1 or not rises:
        return None
    stride = median_low(rises)
    falls = {
        place
        for place, (one, two) in enumerate(pairwise(steps), 1)
        if two.number <= max(1, stride) and one.number - two.number >= (_LEAST_STEPS - 1) * stride
    }
    signs = () if restarts is None else restarts
    restarted = {place for place in _places_after(steps, signs)}
    epoch_starts = falls - restarted
    if restarts is not None:
        epoch_starts = _without_failures(steps, epoch_starts)
    if not epoch_starts:
        return None
    starts, added, n_restarts = [0], [], 0
    for place, step in enumerate(steps):
        before = steps[place - 1] if place else step
        if place in epoch_starts:
            starts.append(starts[-1] + before.number - step.number + stride)
        elif place in falls:
            n_restarts += 1
        elif place in restarted and step.number > before.number + stride and len(starts) > 1:
            starts.pop()  # it continues from a step of the previous epoch
        added.append(starts[-1])
    return Epochs(steps, starts, added, n_restarts)


def _in_order(reports: Iterable[StepReport]) -> list[StepReport]:
    """Sort by time. Coarse clocks may give an epoch's end and the next one's beginning the same time: continuations
    come first."""
    steps: list[StepReport] = []
    for _, of_moment in groupby(sorted(reports), key=lambda step: step.at):
        numbers = list(of_moment)
        goes_on = bisect_right(numbers, steps[-1].number, key=lambda step: step.number) if steps else 0
        steps += numbers[goes_on:] + numbers[:goes_on]
    return steps


def _places_after(steps: Sequence[StepReport], moments: Sequence[float]) -> set[int]:
    """The index of the first step after each moment; without those before or after all steps."""
    at = [step.at for step in steps]
    return {place for place in (bisect_left(at, moment) for moment in moments) if 0 < place < len(steps)}


def _without_failures(steps: Sequence[StepReport], falls: set[int]) -> set[int]:
    """Falls without a long silence before them, or at which several epochs ended with the same number."""
    usual_s = median_low(two.at - one.at for one, two in pairwise(steps))
    ends = Counter(steps[place - 1].number for place in falls)
    return {
        place
        for place in falls
        if steps[place].at - steps[place - 1].at <= max(_PAUSE_STEPS * usual_s, usual_s + _PAUSE_S)
        or ends[steps[place - 1].number] > 1
    }
