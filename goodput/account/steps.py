"""The steps that the world completed: which were kept, how long each took, and where training paused. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from statistics import median_low
from typing import NamedTuple

from goodput.account.categories import Category
from goodput.account.stages import TrainingPause
from goodput.account.sweep import Layer, Span
from goodput.history.facts import LoggedGeneration, WaitSample
from goodput.history.step_log import SettledStep

# A step that takes this many times a normal step's duration is a step and a pause, and the pause is not useful time.
# With long steps a pause counts from PAUSE_S on, or from PAUSE_STEPS steps if that is longer. If the log has many steps
# in one entry, a pause must exceed PAUSE_SHARE of them, because steps never have exactly the same length. Logged waits,
# as for blocking saves, are no pause.
PAUSE_FACTOR = 10.0
PAUSE_S = 60.0
PAUSE_STEPS = 2.0
PAUSE_SHARE = 0.1
# The first steps of a generation are warm-up as far as they exceed this many times a normal step's duration, until one
# does not. Steps that stay slow for longer are simply slow.
WARM_UP_FACTOR = 1.25
WARM_UP_STEPS = 10
STEADY_STEPS = 20  # a generation with more steps has its own normal step duration
ALIKE_STEPS = 5  # as many of all generations of one size have theirs

_at = attrgetter("at")


class Executed(NamedTuple):
    """A step of the world in one generation. `n_steps` > 1: the log lacks the steps before it."""

    step: int
    n_steps: int
    began: float | None  # None: the first step of a generation, which no step precedes
    completed: float
    generation: int
    kept: bool
    incident_id: str  # because of which it was recomputed; '' if kept or unknown
    settled: SettledStep | None = None  # how the time since `began` was spent, if that is accounted for already


def executed_steps(generations: Sequence[LoggedGeneration]) -> list[Executed]:
    """Every step that the world completed, in the order of generations, and whether it was kept.

    A step was recomputed if a later generation continued from an earlier step.
    """
    by_generation: list[list[Executed]] = []
    # Later generations, each of which went back further than those before it; the furthest first.
    returned_to: list[int] = []
    returns: list[LoggedGeneration] = []
    for generation in reversed(generations):
        of_generation: list[Executed] = []
        # From scratch: a script may count its steps from 0 or from 1.
        previous = None if generation.restore_step == -1 else generation.restore_step
        previous_at = None
        for step, at, settled in _each_step(generation, returned_to):
            undone_by = bisect_left(returned_to, step) - 1  # the first later generation that went back before the step
            of_generation.append(
                Executed(
                    step=step,
                    n_steps=max(1, step - previous) if previous is not None else 1,
                    began=previous_at,
                    completed=at,
                    generation=generation.generation,
                    kept=undone_by < 0,
                    incident_id=returns[undone_by].incident_id if undone_by >= 0 else "",
                    settled=settled,
                )
            )
            previous, previous_at = step, at
        by_generation.append(of_generation)
        if generation.restore_step is not None:
            further = bisect_left(returned_to, generation.restore_step)
            del returned_to[further:], returns[further:]
            returned_to.append(generation.restore_step)
            returns.append(generation)
    return [step for of_generation in reversed(by_generation) for step in of_generation]


def _each_step(
    generation: LoggedGeneration, returned_to: Sequence[int]
) -> Iterator[tuple[int, float, SettledStep | None]]:
    """Yield steps with their times. Settled ones are as regular as can be: they are divided where a later generation
    went back to."""
    before, before_at = -1, -math.inf
    for step, at in generation.steps:
        settled = generation.settled.get(step)
        if settled is None or settled.lost is None:
            yield step, at, None
        else:
            between = returned_to[bisect_right(returned_to, before) : bisect_left(returned_to, step)]
            first, first_at = before, before_at
            for end in (*between, step):
                share = (end - before) / (step - first)
                lost = tuple(one._replace(seconds=one.seconds * share) for one in settled.lost)
                before_at = at if end == step else first_at + (at - first_at) * (end - first) / (step - first)
                yield end, before_at, settled._replace(lost=lost)
                before = end
        before, before_at = step, at


def median_step_s(executed: Iterable[Executed]) -> float | None:
    """A normal step's duration: the lower median over steps with a predecessor in their generation.

    Steps of zero length are ignored: they come from clocks coarser than the steps. Settled steps have their own median.
    """
    durations: list[float] = []
    settled: list[tuple[float, int]] = []  # with how many steps they are
    for e in executed:
        if e.settled is not None:
            settled += [(e.settled.step_s, e.n_steps)] if e.settled.step_s is not None else []
        elif e.began is not None and e.completed > e.began:
            durations.append((e.completed - e.began) / e.n_steps)
    if not settled:
        return median_low(durations) if durations else None
    settled = sorted([*settled, *((duration, 1) for duration in durations)])
    middle = (sum(count for _, count in settled) - 1) // 2
    return next(
        s for (s, _), until in zip(settled, accumulate(count for _, count in settled), strict=True) if until > middle
    )


def steady_step_s(
    executed: Iterable[Executed], step_s: float | None, capacity: Mapping[int, float]
) -> dict[int, float | None]:
    """The normal step duration of each generation: its own median if it has enough steps, else that of all generations
    of its `capacity`, whose steps take as long, else `step_s`, that of all."""
    by_generation: defaultdict[int, list[Executed]] = defaultdict(list)
    by_capacity: defaultdict[float, list[Executed]] = defaultdict(list)
    for step in executed:
        by_generation[step.generation].append(step)
        by_capacity[capacity.get(step.generation, 1.0)].append(step)
    alike = {size: median_step_s(steps) for size, steps in by_capacity.items() if _n_steps(steps) >= ALIKE_STEPS}
    return {
        generation: (median_step_s(steps) if _n_steps(steps) > STEADY_STEPS else None)
        or alike.get(capacity.get(generation, 1.0))
        or step_s
        for generation, steps in by_generation.items()
    }


def _n_steps(steps: Iterable[Executed]) -> int:
    """How many steps these are; those that are missing in the log do not count."""
    return sum(1 if step.settled is None else step.n_steps for step in steps)


def settled_spans(executed: Iterable[Executed], windows: Mapping[int, tuple[float, float]]) -> Iterator[Span]:
    """What held up settled steps, one after the other from their beginning: when it was is forgotten."""
    for step in executed:
        if step.settled is not None and step.began is not None:
            lower, upper = windows[step.generation]
            start = step.began
            for lost in step.settled.lost or ():
                end = start + lost.seconds
                if start < upper and end > lower:
                    span = Span(Layer.SETTLED, max(start, lower), min(end, upper), Category(lost.category))
                    yield span._replace(host_id=lost.host_id)
                start = end


def step_spans(
    generations: Sequence[LoggedGeneration], executed: Iterable[Executed], steady_s: Mapping[int, float | None]
) -> tuple[dict[int, list[Span]], list[TrainingPause]]:
    """The spans of every step by generation, ascending, with the warm-up before it; and the pauses between steps."""
    window = windows(generations)
    first_from = {g.generation: _ready_at(g) for g in generations}
    answered = {g.generation: g.incident_id for g in generations}
    medians = {g.generation: {last.step: last.median_at for last in g.last_ranks} for g in generations}
    waits = {g.generation: tuple(g.waited.values()) for g in generations}
    spans: dict[int, list[Span]] = {g.generation: [] for g in generations}
    pauses: list[TrainingPause] = []
    last: dict[int, float] = {}
    warming_up: dict[int, int] = {}  # generation -> steps that may still be warm-up
    for step in executed:
        began, completed = step.began, step.completed
        until = completed
        step_s = steady_s.get(step.generation)
        expected = None if step_s is None else step_s * step.n_steps
        if expected is not None and began is not None and completed - began > expected:
            expected += sum(_waited_s(samples, began, completed) for samples in waits[step.generation])
        lower, upper = window[step.generation]
        if began is None:
            # A generation's first step counts for one normal step's duration; the rest is warm-up or start-up.
            ready = first_from[step.generation]
            began = completed if ready is None else ready
            if expected is not None:
                began = max(began, completed - expected)
            warming_up[step.generation] = WARM_UP_STEPS - 1
        elif step.settled is not None:
            warming_up[step.generation] = 0
        elif step_s is not None and expected is not None and completed - began > (most_s := _most_s(step_s, expected)):
            median_at = medians[step.generation].get(step.step, math.inf)
            if began < median_at <= began + most_s and median_at < completed - expected:
                pauses.append(TrainingPause(median_at, completed, step.generation, step_s))
                until = median_at  # most ranks had completed it by then
            else:
                pauses.append(TrainingPause(began, completed, step.generation, step_s))
                began = completed - expected
            warming_up[step.generation] = 0
        elif warming_up.get(step.generation, 0):
            slow = expected is not None and completed - began > WARM_UP_FACTOR * expected
            warming_up[step.generation] = warming_up[step.generation] - 1 if slow else 0
            if slow and expected is not None:
                incident_id = answered[step.generation]
                warm = Span(
                    Layer.STEP, max(began, lower), min(completed - expected, upper), Category.WARM_UP, incident_id
                )
                spans[step.generation].append(warm)
                began = completed - expected
        last[step.generation] = completed
        category = Category.USEFUL if step.kept else Category.RECOMPUTED
        span = Span(Layer.STEP, max(began, lower), min(until, upper), category, step.incident_id)
        spans[step.generation].append(span)
    for generation, at in last.items():
        if at < window[generation][1]:
            pauses.append(TrainingPause(at, math.inf, generation, steady_s.get(generation)))
    return {g: [s for s in of if s.start < s.end] for g, of in spans.items()}, pauses


def _most_s(step_s: float, expected: float) -> float:
    """The longest that steps expected to take `expected` may take without containing a pause."""
    slack_s = min((PAUSE_FACTOR - 1.0) * step_s, max(PAUSE_S, PAUSE_STEPS * step_s))
    return expected + max(slack_s, PAUSE_SHARE * expected)


def _waited_s(samples: Sequence[WaitSample], began: float, completed: float) -> float:
    """How much of the logged waits may lie between two moments. Samples are totals, ascending."""
    before = bisect_right(samples, began, key=_at)
    until = min(bisect_left(samples, completed, key=_at), len(samples) - 1)
    if until < before:
        return 0.0
    return samples[until].total_s - (samples[before - 1].total_s if before else 0.0)


def windows(generations: Sequence[LoggedGeneration]) -> dict[int, tuple[float, float]]:
    """The time window in which a generation's steps count.

    Workers that were cut off may continue after their successors started, but the successors' time does not count for
    them.
    """
    window = {}
    upper = math.inf
    for generation in reversed(generations):
        lower = generation.began_at if generation.began_at is not None else -math.inf
        window[generation.generation] = (min(lower, upper), upper)
        upper = min(lower, upper) if generation.began_at is not None else upper
    return window


def _ready_at(generation: LoggedGeneration) -> float | None:
    """When the first step could begin, as far as the log shows."""
    known = [t for t in (generation.started_at, generation.restore_began_at, generation.restored_at) if t is not None]
    return max(known, default=None)
