"""Step numbers that begin anew with each epoch, made into numbers through the whole run. Pure.

Scripts of Lightning and Hugging Face may number the batches of an epoch. So where numbers begin anew and nothing tells
of a failure, an epoch ended: no step is done again. What is taken for that is told by who asks; the rest is a restart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import median_low
from typing import NamedTuple

_LEAST_STEPS = 3  # of an epoch: numbers that fall by less are lines that came late
# Between two epochs lies a step, the start of the processes that load data, and perhaps an evaluation. A longer silence
# than these is a failure's, unless several epochs ended with the same number.
_PAUSE_STEPS = 3.0
_PAUSE_S = 5.0


class Telling(NamedTuple):
    """A step's number as it was told."""

    at: float
    number: int


class Epochs:
    """How numbers go on. One teller's numbers say where epochs began; those of the others belong to the nearest."""

    def __init__(self, told: Sequence[Telling], starts: Sequence[int], added: Sequence[int], restarts: int) -> None:
        self.starts = tuple(starts)  # of the epochs up to the newest: what is added to its numbers
        self.count = len(set(added))
        self.restarts = restarts  # that went back to a first number: taken to begin the newest epoch again
        self.first, self.last = told[0].number, told[-1].number
        self._at = [telling.at for telling in told]
        self._added = added
        self._told: dict[int, list[tuple[float, int]]] = {}
        for telling, more in zip(told, added, strict=True):
            self._told.setdefault(telling.number, []).append((telling.at, more))

    def number(self, told: Telling) -> int:
        """The number through the run of a step that was completed then."""
        tellings = self._told.get(told.number)
        if tellings is None:
            return told.number + self._added[max(0, bisect_right(self._at, told.at) - 1)]
        place = bisect_left(tellings, (told.at, 0))
        _, added = min(tellings[max(0, place - 1) : place + 1], key=lambda telling: abs(telling[0] - told.at))
        return told.number + added

    def number_before(self, told: Telling) -> int:
        """The same of a step that had been completed by then, as one that was saved or restored."""
        tellings = self._told.get(told.number, [])
        place = bisect_right(tellings, told.at, key=lambda telling: telling[0])
        return told.number + tellings[place - 1][1] if place else self.number(told)


def epochs_in(tellings: Iterable[Telling], *, restarts: Sequence[float] | None = None) -> Epochs | None:
    """The epochs of what one teller told; None: its numbers do not begin anew.

    `restarts`: when there was a sign of one, in the order of time; beside these a long silence is one. None: it is
    known that there was none.
    """
    told = _in_order(tellings)
    rises = [two.number - one.number for one, two in pairwise(told) if two.number > one.number]
    if len(rises) == len(told) - 1 or not rises:
        return None
    stride = median_low(rises)
    falls = {
        place
        for place, (one, two) in enumerate(pairwise(told), 1)
        if two.number <= max(1, stride) and one.number - two.number >= (_LEAST_STEPS - 1) * stride
    }
    signs = () if restarts is None else restarts
    restarted = {place for place in _places_after(told, signs)}
    began_anew = falls - restarted
    if restarts is not None:
        began_anew = _without_failures(told, began_anew)
    if not began_anew:
        return None
    starts, added, n_restarts = [0], [], 0
    for place, telling in enumerate(told):
        before = told[place - 1] if place else telling
        if place in began_anew:
            starts.append(starts[-1] + before.number - telling.number + stride)
        elif place in falls:
            n_restarts += 1
        elif place in restarted and telling.number > before.number + stride and len(starts) > 1:
            starts.pop()  # it goes on from a step of the epoch before
        added.append(starts[-1])
    return Epochs(told, starts, added, n_restarts)


def _in_order(tellings: Iterable[Telling]) -> list[Telling]:
    """Of the same moment, as coarse clocks tell of an epoch's end and the next one's beginning, first what goes on."""
    told: list[Telling] = []
    for _, of_moment in groupby(sorted(tellings), key=lambda telling: telling.at):
        numbers = list(of_moment)
        goes_on = bisect_right(numbers, told[-1].number, key=lambda telling: telling.number) if told else 0
        told += numbers[goes_on:] + numbers[:goes_on]
    return told


def _places_after(told: Sequence[Telling], moments: Sequence[float]) -> set[int]:
    """The first telling after each moment, but for those before all."""
    at = [telling.at for telling in told]
    return {place for place in (bisect_left(at, moment) for moment in moments) if 0 < place < len(told)}


def _without_failures(told: Sequence[Telling], falls: set[int]) -> set[int]:
    """Those that no long silence precedes, or where several epochs ended with the same number."""
    usual_s = median_low(two.at - one.at for one, two in pairwise(told))
    ends = Counter(told[place - 1].number for place in falls)
    return {
        place
        for place in falls
        if told[place].at - told[place - 1].at <= max(_PAUSE_STEPS * usual_s, usual_s + _PAUSE_S)
        or ends[told[place - 1].number] > 1
    }
