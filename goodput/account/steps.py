"""The steps that the world completed: which were kept, what each took, and where training paused. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from goodput.account.categories import Category
from goodput.account.stages import TrainingPause
from goodput.account.sweep import Layer, Span
from goodput.history.facts import LoggedGeneration

# A step that takes this many times as long as steps do is a step and a pause: the pause is not useful time. A pause of
# long steps is one from PAUSE_S on, or from PAUSE_STEPS steps on if that is more. Where the log tells of many steps at
# once a pause is longer than PAUSE_SHARE of them: steps are never quite of the same length.
PAUSE_FACTOR = 10.0
PAUSE_S = 60.0
PAUSE_STEPS = 2.0
PAUSE_SHARE = 0.1
# The first steps of a generation that take this many times as long as steps do are warm-up beyond that, until one does
# not; steps that are slow for longer are simply slow.
WARM_UP_FACTOR = 1.25
WARM_UP_STEPS = 10
STEADY_STEPS = 20  # a generation with so many has a steady step time of its own


class Executed(NamedTuple):
    """A step of the world in one generation: `n_steps` > 1 where the log lacks the steps before it."""

    step: int
    n_steps: int
    began: float | None  # None: the first of a generation, whose beginning is not a step's end
    completed: float
    generation: int
    kept: bool
    incident_id: str  # because of which it was done again, '' if kept or unknown


def executed_steps(generations: Sequence[LoggedGeneration]) -> list[Executed]:
    """Every step that the world completed, in the order of generations, with its fate: a step beyond the one from
    which a later generation went on was done again."""
    by_generation: list[list[Executed]] = []
    # Later generations, each of which went back further than those before it: the furthest first.
    returned_to: list[int] = []
    returns: list[LoggedGeneration] = []
    for generation in reversed(generations):
        of_generation: list[Executed] = []
        # From scratch: a script may count its steps from 0 or from 1.
        previous = None if generation.restore_step == -1 else generation.restore_step
        previous_at = None
        for step, at in generation.steps:
            undone_by = bisect_left(returned_to, step) - 1  # the first one after it that went back before the step
            of_generation.append(
                Executed(
                    step=step,
                    n_steps=max(1, step - previous) if previous is not None else 1,
                    began=previous_at,
                    completed=at,
                    generation=generation.generation,
                    kept=undone_by < 0,
                    incident_id=returns[undone_by].incident_id if undone_by >= 0 else "",
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


def median_step_s(executed: Iterable[Executed]) -> float | None:
    """What a step takes: the lower median of all that have a step before them in their generation. Steps of no length
    are left out: they come from clocks that are coarser than the steps."""
    durations = [(e.completed - e.began) / e.n_steps for e in executed if e.began is not None and e.completed > e.began]
    return median_low(durations) if durations else None


def steady_step_s(executed: Iterable[Executed], step_s: float | None) -> dict[int, float | None]:
    """What a step takes in each generation: its own median where it has enough steps, else that of all, `step_s`."""
    by_generation: defaultdict[int, list[Executed]] = defaultdict(list)
    for step in executed:
        by_generation[step.generation].append(step)
    return {
        generation: (median_step_s(steps) if len(steps) > STEADY_STEPS else None) or step_s
        for generation, steps in by_generation.items()
    }


def step_spans(
    generations: Sequence[LoggedGeneration], executed: Iterable[Executed], steady_s: Mapping[int, float | None]
) -> tuple[dict[int, list[Span]], list[TrainingPause]]:
    """The time of every step by generation, ascending, with the warm-up before it, and the pauses between steps."""
    window = windows(generations)
    first_from = {g.generation: _ready_at(g) for g in generations}
    answered = {g.generation: g.incident_id for g in generations}
    medians = {g.generation: {last.step: last.median_at for last in g.last_ranks} for g in generations}
    spans: dict[int, list[Span]] = {g.generation: [] for g in generations}
    pauses: list[TrainingPause] = []
    last: dict[int, float] = {}
    warming_up: dict[int, int] = {}  # generation -> steps that may still be warm-up
    for step in executed:
        began, completed = step.began, step.completed
        until = completed
        step_s = steady_s.get(step.generation)
        expected = None if step_s is None else step_s * step.n_steps
        lower, upper = window[step.generation]
        if began is None:
            # The first step of a generation: as much of it as a step takes; the rest is warm-up or start-up.
            ready = first_from[step.generation]
            began = completed if ready is None else ready
            if expected is not None:
                began = max(began, completed - expected)
            warming_up[step.generation] = WARM_UP_STEPS - 1
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
    """What steps that should take `expected` may take before a pause must lie in it."""
    slack_s = min((PAUSE_FACTOR - 1.0) * step_s, max(PAUSE_S, PAUSE_STEPS * step_s))
    return expected + max(slack_s, PAUSE_SHARE * expected)


def windows(generations: Sequence[LoggedGeneration]) -> dict[int, tuple[float, float]]:
    """From when to when a generation's steps count. Workers that were cut off may go on after their successors
    started; the successors' time is not theirs."""
    window = {}
    upper = math.inf
    for generation in reversed(generations):
        lower = generation.began_at if generation.began_at is not None else -math.inf
        window[generation.generation] = (min(lower, upper), upper)
        upper = min(lower, upper) if generation.began_at is not None else upper
    return window


def _ready_at(generation: LoggedGeneration) -> float | None:
    """When the first step could begin, as far as the log tells."""
    known = [t for t in (generation.started_at, generation.restore_began_at, generation.restored_at) if t is not None]
    return max(known, default=None)
