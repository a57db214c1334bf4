"""Widens an interval in steps when saves take longer than the training between them: a slow peer or network must not
set the pace of training, nor the copy of a large state. Pure.

The interval is multiplied by a factor, a power of two. So every step of a wider interval is also one of each narrower
interval, and ranks that use different factors for a moment still save common steps; steps that only some of them saved
are abandoned. The factor travels in a word that only grows, like everything that the coordinator sends.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

LATE_SAVES: Final = 2  # in a row, before the interval is widened
LOST_S: Final = 2.0  # of training, which they must have cost in total
LONG_S: Final = 0.1  # a save is late if training waited this long for it,
LONG_SHARE: Final = 0.2  # or for this share of the time since the save before; or copied for this share
HEADROOM: Final = 1.25  # training time between two saves / duration of a save
COPY_HEADROOM: Final = 4.0  # training time between two saves / time of the copy, for which training stands
CHEAP_SAVES: Final = 4  # in a row that had this headroom at half the interval, before it is narrowed
MAX_CHEAP_SAVES: Final = 64
_MAX_LOG2 = 40
_CHANGE = 64  # word = number of changes * _CHANGE + log2(factor)
_REMEMBERED_LATE = 256
_REMEMBERED = 8  # saves in progress; there are never more than slots


def factor_of(word: int) -> int:
    """The factor in a word; 1 for 0, and for -1 (none)."""
    return 1 << min(max(word, 0) % _CHANGE, _MAX_LOG2)


class Cost(NamedTuple):
    """The measurements at the last change of the factor."""

    save_s: float = 0.0  # from the capture until the whole world had the step
    step_s: float = 0.0  # of training, without waits for saves
    copied_s: float = 0.0  # of the copy

    @property
    def between_s(self) -> float:
        """How long training should last between two saves."""
        return max(HEADROOM * self.save_s, COPY_HEADROOM * self.copied_s)


class _Begun(msgspec.Struct):
    at_s: float
    steps: int  # since the save before
    passed_s: float
    copied_s: float


class SavePace:
    """Takes the course of one rank's saves, and returns the factor. One rank stands for all: all wait for the same
    world step. Run by the coordinator."""

    def __init__(self, interval_steps: int, word: int = 0) -> None:
        """`word`: from the coordinator before this one."""
        self.interval_steps = interval_steps
        self.word = max(word, 0)
        self.cost = Cost()
        self._newest: tuple[int, float] | None = None  # step and time of the newest capture
        self._begun: dict[int, _Begun] = {}
        self._waits: dict[int, float] = {}
        self._completed = (-1, -math.inf)  # the newest world step, and since when
        self._late: list[tuple[Cost, float]] = []  # in a row, and how long training waited for each
        self._cheap = 0
        self._cheap_needed = CHEAP_SAVES
        self._was_narrowed = False

    @property
    def factor(self) -> int:
        return factor_of(self.word)

    def captured(self, step: int, now_s: float, copied_s: float = 0.0) -> None:
        """The rank's shard of `step` is complete in a slot. Training stood for `copied_s` while it was copied."""
        if self._newest is not None and step > self._newest[0]:
            self._begun[step] = _Begun(now_s, step - self._newest[0], now_s - self._newest[1], copied_s)
            self._begun = dict(list(self._begun.items())[-_REMEMBERED:])
        if self._newest is None or step > self._newest[0]:
            self._newest = (step, now_s)

    def waited(self, step: int, waited_s: float) -> None:
        """Training waited this long for the save of `step`, successfully or not. Short waits are not reported."""
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
        step_s = max(begun.passed_s - waited_s - begun.copied_s, 0.0) / begun.steps
        cost = Cost(now_s - max(begun.at_s, free_at_s), max(step_s, 1e-6), begun.copied_s)
        is_late = waited_s > 0 and waited_s >= min(LONG_S, LONG_SHARE * begun.passed_s)
        if is_late or begun.copied_s > LONG_SHARE * begun.passed_s:
            self._cheap = 0
            self._late = [*self._late[-_REMEMBERED_LATE:], (cost, waited_s + begun.copied_s)]
            return self._widen()
        self._late.clear()
        return self._narrow(cost)

    def _widen(self) -> bool:
        late = self._late
        if len(late) < LATE_SAVES or sum(waited_s for _, waited_s in late) < LOST_S:
            return False
        cost = Cost(*(sum(values) / len(late) for values in zip(*(cost for cost, _ in late), strict=True)))
        log2 = math.ceil(math.log2(max(cost.between_s / (cost.step_s * self.interval_steps), 1.0)))
        if 1 << log2 <= self.factor:
            return False  # a wider interval would not help
        if self._was_narrowed:
            self._cheap_needed = min(2 * self._cheap_needed, MAX_CHEAP_SAVES)
        self._change(log2, cost)
        self._was_narrowed = False
        return True

    def _narrow(self, cost: Cost) -> bool:
        half_s = cost.step_s * self.interval_steps * self.factor / 2
        self._cheap = self._cheap + 1 if half_s >= cost.between_s else 0
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
