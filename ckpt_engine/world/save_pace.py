"""How far apart saves of an interval in steps are made, where they cost more than the training between them: a peer or
a network that is too slow must not set the pace of training. Pure.

The interval is multiplied by a factor, a power of two. So the steps of a wider interval are steps of each narrower one
too, and ranks that have heard of different factors still have steps together; what only some of them saved meanwhile is
abandoned. The factor travels as one number that only grows, like all that the coordinator says.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

LATE_SAVES: Final = 2  # in a row, until the interval is widened
LOST_S: Final = 2.0  # for which these have held up training, in all
LONG_S: Final = 0.1  # a save is late that held it up for so long,
LONG_SHARE: Final = 0.2  # or for this part of the time since the one before
HEADROOM: Final = 1.25  # the training between two saves, over what a save takes
CHEAP_SAVES: Final = 4  # in a row, that would be so at half the interval as well, until it is narrowed
MAX_CHEAP_SAVES: Final = 64
_MAX_LOG2 = 40
_CHANGE = 64  # the word is the number of changes times this, and the logarithm of the factor
_REMEMBERED_LATE = 256
_REMEMBERED = 8  # saves on their way; there are never more than slots


def factor_of(word: int) -> int:
    """What the interval is multiplied by; `word` 0 (and -1, none) is 1."""
    return 1 << (max(word, 0) % _CHANGE)


class Cost(NamedTuple):
    """What was measured when the factor was changed last."""

    save_s: float = 0.0  # from a capture until the whole world had the step
    step_s: float = 0.0  # of training, without its waits for saves


class _Begun(msgspec.Struct):
    at_s: float
    steps: int  # since the one before
    passed_s: float


class SavePace:
    """The coordinator's: how the saves of one rank fared in, the factor out. One rank stands for all: what they wait
    for is the world step, and that is the same for all of them."""

    def __init__(self, interval_steps: int, word: int = 0) -> None:
        """`word`: as this coordinator's predecessor left it."""
        self.interval_steps = interval_steps
        self.word = max(word, 0)
        self.cost = Cost()
        self._newest: tuple[int, float] | None = None  # step and moment of the newest capture
        self._begun: dict[int, _Begun] = {}
        self._waits: dict[int, float] = {}
        self._completed = (-1, -math.inf)  # the newest step that the world has, and since when
        self._late: list[tuple[Cost, float]] = []  # those in a row, and how long training waited for each
        self._cheap = 0
        self._cheap_needed = CHEAP_SAVES
        self._was_narrowed = False

    @property
    def factor(self) -> int:
        return factor_of(self.word)

    def captured(self, step: int, now_s: float) -> None:
        """The rank's shard of `step` is whole, in a slot."""
        if self._newest is not None and step > self._newest[0]:
            self._begun[step] = _Begun(now_s, step - self._newest[0], now_s - self._newest[1])
            self._begun = dict(list(self._begun.items())[-_REMEMBERED:])
        if self._newest is None or step > self._newest[0]:
            self._newest = (step, now_s)

    def waited(self, step: int, waited_s: float) -> None:
        """Training has waited for the save of `step` so long, in vain or not; of short waits nothing is said."""
        if step > self._completed[0]:
            self._waits[step] = max(self._waits.get(step, 0.0), waited_s)
            self._waits = dict(sorted(self._waits.items())[-_REMEMBERED:])

    def completed(self, step: int, now_s: float) -> bool:
        """The whole world has `step`. True if the factor has changed."""
        begun, free_at_s = self._begun.get(step), self._completed[1]
        waited_s = sum(waited_s for of, waited_s in self._waits.items() if of <= step)
        self._completed = (step, now_s)
        self._begun = {of: save for of, save in self._begun.items() if of > step}
        self._waits = {of: waited for of, waited in self._waits.items() if of > step}
        if begun is None:
            return False
        step_s = max(begun.passed_s - waited_s, 0.0) / begun.steps
        cost = Cost(now_s - max(begun.at_s, free_at_s), max(step_s, 1e-6))
        if waited_s >= min(LONG_S, LONG_SHARE * begun.passed_s) and waited_s > 0:
            self._cheap = 0
            self._late = [*self._late[-_REMEMBERED_LATE:], (cost, waited_s)]
            return self._widen()
        self._late.clear()
        return self._narrow(cost)

    def _widen(self) -> bool:
        late = self._late
        if len(late) < LATE_SAVES or sum(waited_s for _, waited_s in late) < LOST_S:
            return False
        cost = Cost(*(sum(values) / len(late) for values in zip(*(cost for cost, _ in late), strict=True)))
        log2 = math.ceil(math.log2(max(HEADROOM * cost.save_s / (cost.step_s * self.interval_steps), 1.0)))
        if 1 << log2 <= self.factor:
            return False  # what it waited for, a wider interval does not make cheaper
        if self._was_narrowed:
            self._cheap_needed = min(2 * self._cheap_needed, MAX_CHEAP_SAVES)
        self._change(log2, cost)
        self._was_narrowed = False
        return True

    def _narrow(self, cost: Cost) -> bool:
        half_s = cost.step_s * self.interval_steps * self.factor / 2
        self._cheap = self._cheap + 1 if half_s >= HEADROOM * cost.save_s else 0
        if self.factor == 1 or self._cheap < self._cheap_needed:
            return False
        self._change(self.word % _CHANGE - 1, cost)
        self._was_narrowed = True
        return True

    def _change(self, log2: int, cost: Cost) -> None:
        self.word = (self.word // _CHANGE + 1) * _CHANGE + min(log2, _MAX_LOG2)
        self.cost = cost
        self._late.clear()
        self._cheap = 0
