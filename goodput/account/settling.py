"""Accounts for the older steps of a long job once and for all, so that its account needs no more memory however long it
trains. Pure.

The newest steps stay as they were logged. Of the others a stretch of many steps is kept with how long each category
took within it. Steps around an incident stay single, and steps in whose time an incident had a part stay in full.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import fsum
from statistics import fmean, median_low

import msgspec

from goodput.account.categories import Category
from goodput.account.intervals import all_spans
from goodput.account.steps import Executed, executed_steps, median_step_s, windows
from goodput.account.sweep import Interval, sweep
from goodput.history.facts import History, LoggedGeneration
from goodput.history.step_log import LostSeconds, SettledStep

SINGLE_STEPS = 12  # before and after a mark: more than any rule about marks looks at
STRETCH_STEPS = 50  # at first; stretches are joined as their number grows
_STEP_TIME = (Category.USEFUL, Category.RECOMPUTED)  # which of them it is depends on what is restored later

Settled = Mapping[int, Sequence[SettledStep]]


def settle(history: History, *, keep: int, stretches: int, can_settle: Collection[int]) -> Settled:
    """What to keep of the steps of these generations, except for the newest `keep` of the job: about as many stretches
    as wanted, and single steps near marks."""
    logged = sorted(step.at for g in history.generations for step in g.steps if step.at > g.settled_until)
    if len(logged) <= keep:
        return {}
    until = logged[-keep - 1]
    window = windows(history.generations)
    each = {g.generation: list(g.settled.values()) for g in history.generations if g.generation in can_settle}
    of_generation = {g.generation: g for g in history.generations}
    history = msgspec.structs.replace(history, generations=tuple(map(_without_stretches, history.generations)))
    executed = executed_steps(history.generations)
    fresh = [e for e in executed if of_generation[e.generation].settled_until < e.completed <= until]
    since = min((e.began for e in fresh if e.began is not None), default=until)
    spent = _StepTime(list(sweep(all_spans(history, executed, median_step_s(executed)), since, until)))
    for step in fresh:
        if step.generation in each:
            each[step.generation].append(_settled(step, of_generation[step.generation], spent, window[step.generation]))
    return _fewer({number: steps for number, steps in each.items() if steps}, stretches, _marks(history))


def _without_stretches(generation: LoggedGeneration) -> LoggedGeneration:
    """Without what is settled already, but for single steps: to settle more, nobody needs it."""
    if not generation.settled:
        return generation
    single = (
        step
        for one, step in pairwise(generation.steps)
        if step.step - one.step == 1 or step.at >= generation.settled_until
    )
    return msgspec.structs.replace(generation, steps=(*generation.steps[:1], *single), settled={})


def _marks(history: History) -> Sequence[float]:
    """The moments around which single steps matter."""
    opened = (incident.opened_at for incident in history.incidents)
    return sorted({*opened, *(decision.at for decision in history.decisions), *history.faults})


class _StepTime:
    """Finds how the time between two moments was spent."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self._ends = [interval.end for interval in intervals]

    def between(self, began: float, completed: float) -> Iterator[tuple[Interval, float]]:
        """Yield intervals, each with the seconds of it in between."""
        for place in range(bisect_right(self._ends, began), len(self._intervals)):
            interval = self._intervals[place]
            if interval.start >= completed:
                return
            yield interval, min(completed, interval.end) - max(began, interval.start)


def _settled(
    step: Executed, generation: LoggedGeneration, spent: _StepTime, window: tuple[float, float]
) -> SettledStep:
    number = step.step - generation.numbered_from
    in_full = SettledStep(number, step.completed)
    if step.began is None:
        return in_full
    began, completed = max(step.began, window[0]), min(step.completed, window[1])
    step_s = (step.completed - step.began) / step.n_steps
    if began >= completed:  # its workers were cut off, and their time does not count
        return in_full._replace(step_s=step_s or None, lost=())
    if (began, completed) != (step.began, step.completed):
        return in_full
    lost = []
    for interval, seconds in spent.between(began, completed):
        if interval.category not in _STEP_TIME:
            if interval.incident_id:
                return in_full
            lost.append(LostSeconds(interval.category.value, interval.host_id, seconds))
    return SettledStep(number, step.completed, step_s or None, tuple(lost))


def _joined(steps: Sequence[SettledStep], marks: Sequence[float], size: int) -> list[SettledStep]:
    """These steps in stretches of about this many."""
    single = _single(steps, marks)
    found: list[SettledStep] = []
    middle = median_low if size == STRETCH_STEPS else fmean

    def stretch_of(place: int) -> tuple[int, int]:
        step = steps[place]
        return (place, -1) if place in single or step.lost is None else (-1, step.step // size)

    for (place, _), places in groupby(range(len(steps)), key=stretch_of):
        found.append(steps[place] if place >= 0 else _stretch([steps[p] for p in places], middle))
    return found


def _single(steps: Sequence[SettledStep], marks: Iterable[float]) -> set[int]:
    """The places of the steps around marks."""
    at = [step.at for step in steps]
    single: set[int] = set()
    for mark in marks:
        place = bisect_left(at, mark)
        if at and at[0] <= mark <= at[-1]:
            single.update(range(max(0, place - SINGLE_STEPS), min(len(steps), place + SINGLE_STEPS)))
    return single


def _stretch(steps: Sequence[SettledStep], middle: Callable[[Sequence[float]], float]) -> SettledStep:
    """Several steps as one. `middle`: of their durations."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        for category, host_id, part_s in step.lost or ():
            seconds[category, host_id].append(part_s)
    step_s = [step.step_s for step in steps if step.step_s is not None]
    lost = tuple(LostSeconds(category, host_id, fsum(of)) for (category, host_id), of in sorted(seconds.items()))
    return SettledStep(steps[-1].step, steps[-1].at, middle(step_s) if step_s else None, lost)


def _fewer(each: Mapping[int, Sequence[SettledStep]], stretches: int, marks: Sequence[float]) -> Settled:
    """All steps in stretches, which are the longer the more there are."""
    size, newest = STRETCH_STEPS, max((steps[-1].step for steps in each.values()), default=0)
    found = {number: _joined(steps, marks, size) for number, steps in each.items()}
    while sum(map(len, found.values())) > stretches and size <= newest:
        size *= 2
        found = {number: _joined(steps, marks, size) for number, steps in found.items()}
    return found
