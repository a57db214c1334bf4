"""From a job's history to intervals that are exclusive and exhaustive.

Three layers of spans lie on the axis [start, end]: what the control plane was doing (the base, one stage at any
moment), the steps on top of it, and what interrupted a step (a blocking save, an evaluation) on top of those. A sweep
over all boundaries takes the highest span of every piece. The pieces share their boundaries, so they sum to the
elapsed time whatever the log says; a piece without a span is `unknown`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

import msgspec

from goodput.categories import Category
from goodput.history import BlockedSample, Generation, History
from goodput.stages import Pause, stages

# A step that takes this many times as long as steps do is a step and a pause: the pause is not useful time.
PAUSE_FACTOR = 10.0


class Interval(NamedTuple):
    """A piece of the elapsed time: wall clock, start < end."""

    start: float
    end: float
    category: Category
    incident_id: str  # '' where no incident is the cause

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Layer(IntEnum):
    BASE = 0
    STEP = 1
    BLOCKED = 2
    EVALUATION = 3


class Span(NamedTuple):
    """A claim on a part of the axis; where spans overlap the higher layer holds, in one layer the later start."""

    layer: Layer
    start: float
    end: float
    category: Category
    incident_id: str = ""


class Executed(NamedTuple):
    """A step of the world in one generation: `n_steps` > 1 where the log lacks the steps before it."""

    step: int
    n_steps: int
    began: float | None  # None: the first of a generation, whose beginning is not a step's end
    completed: float
    generation: int
    kept: bool
    incident_id: str  # because of which it was done again, '' if kept or unknown


class Timeline(msgspec.Struct, frozen=True):
    intervals: tuple[Interval, ...]
    executed: tuple[Executed, ...]
    step_s: float | None  # the median step, None before two steps in a row


def timeline(history: History) -> Timeline:
    """The intervals of a job's elapsed time; they partition [history.start, history.end]."""
    executed = executed_steps(history.generations)
    step_s = median_step_s(executed)
    steps, pauses = _step_spans(history.generations, executed, step_s)
    spans = [*_base_spans(history, pauses), *steps, *_evaluation_spans(history, step_s)]
    for generation in history.generations:
        spans += _blocked_spans(generation, steps)
    intervals = tuple(sweep(spans, history.start, history.end))
    return Timeline(intervals=intervals, executed=tuple(executed), step_s=step_s)


def sweep(spans: Iterable[Span], start: float, end: float) -> Iterator[Interval]:
    """The highest span of every piece of [start, end], neighbours of one kind joined."""
    clipped = sorted((max(s.start, start), min(s.end, end), s) for s in spans if max(s.start, start) < min(s.end, end))
    cuts = sorted({start, end, *(c[0] for c in clipped), *(c[1] for c in clipped)})
    active: list[tuple[int, float, float, Category, str]] = []  # highest first
    joined: Interval | None = None
    coming = 0
    for left, right in pairwise(cuts):
        while coming < len(clipped) and clipped[coming][0] <= left:
            _, until, span = clipped[coming]
            heapq.heappush(active, (-span.layer, -span.start, until, span.category, span.incident_id))
            coming += 1
        while active and active[0][2] <= left:
            heapq.heappop(active)
        category, incident_id = active[0][3:] if active else (Category.UNKNOWN, "")
        if joined and (joined.category, joined.incident_id) == (category, incident_id):
            joined = joined._replace(end=right)
        else:
            if joined:
                yield joined
            joined = Interval(left, right, category, incident_id)
    if joined:
        yield joined


# --- steps -----------------------------------------------------------------------------------------------------------


def executed_steps(generations: Sequence[Generation]) -> list[Executed]:
    """Every step that the world completed, in the order of generations, with its fate: a step beyond the one from
    which a later generation went on was done again."""
    by_generation: list[list[Executed]] = []
    returns: list[Generation] = []  # later generations in order, each of which went back further than those before it
    for generation in reversed(generations):
        of_generation: list[Executed] = []
        # From scratch: a script may count its steps from 0 or from 1.
        previous = None if generation.restore_step == -1 else generation.restore_step
        previous_at = None
        for step, at in generation.steps:
            undone_by = next((g for g in returns if _went_back_before(g, step)), None)
            of_generation.append(
                Executed(
                    step=step,
                    n_steps=max(1, step - previous) if previous is not None else 1,
                    began=previous_at,
                    completed=at,
                    generation=generation.generation,
                    kept=undone_by is None,
                    incident_id=undone_by.incident_id if undone_by else "",
                )
            )
            previous, previous_at = step, at
        by_generation.append(of_generation)
        if generation.restore_step is not None:
            returns = [generation, *(g for g in returns if _went_back_before(g, generation.restore_step))]
    return [step for of_generation in reversed(by_generation) for step in of_generation]


def _went_back_before(generation: Generation, step: int) -> bool:
    return generation.restore_step is not None and generation.restore_step < step


def median_step_s(executed: Iterable[Executed]) -> float | None:
    """What a step takes: the lower median of all that have a step before them in their generation. Steps of no length
    are left out: they come from clocks that are coarser than the steps."""
    durations = [(e.completed - e.began) / e.n_steps for e in executed if e.began is not None and e.completed > e.began]
    return median_low(durations) if durations else None


def _step_spans(
    generations: Sequence[Generation], executed: Iterable[Executed], step_s: float | None
) -> tuple[list[Span], list[Pause]]:
    """The time of every step, disjoint and ascending, and the pauses between them."""
    window = _windows(generations)
    first_from = {g.generation: _ready_at(g) for g in generations}
    spans: list[Span] = []
    pauses: list[Pause] = []
    last: dict[int, float] = {}
    for step in executed:
        began, completed = step.began, step.completed
        expected = None if step_s is None else step_s * step.n_steps
        if began is None:
            # The first step of a generation: as much of it as a step takes; the rest is warm-up or start-up.
            ready = first_from[step.generation]
            began = completed if ready is None else ready
            if expected is not None:
                began = max(began, completed - expected)
        elif expected is not None and completed - began > PAUSE_FACTOR * expected:
            pauses.append(Pause(began, completed, step.generation, step_s))
            began = completed - expected
        last[step.generation] = completed
        lower, upper = window[step.generation]
        spans.append(
            Span(
                Layer.STEP,
                max(began, lower),
                min(completed, upper),
                Category.USEFUL if step.kept else Category.RECOMPUTED,
                step.incident_id,
            )
        )
    pauses += [Pause(at, math.inf, generation, step_s) for generation, at in last.items() if at < window[generation][1]]
    return [s for s in spans if s.start < s.end], pauses


def _windows(generations: Sequence[Generation]) -> dict[int, tuple[float, float]]:
    """From when to when a generation's steps count. Workers that were cut off may go on after their successors
    started; the successors' time is not theirs."""
    window = {}
    upper = math.inf
    for generation in reversed(generations):
        lower = generation.began_at if generation.began_at is not None else -math.inf
        window[generation.generation] = (min(lower, upper), upper)
        upper = min(lower, upper) if generation.began_at is not None else upper
    return window


def _ready_at(generation: Generation) -> float | None:
    """When the first step could begin, as far as the log tells."""
    known = [t for t in (generation.started_at, generation.restore_began_at, generation.restored_at) if t is not None]
    return max(known, default=None)


# --- what lies below and above the steps -----------------------------------------------------------------------------


def _base_spans(history: History, pauses: Iterable[Pause]) -> Iterator[Span]:
    found = stages(history, pauses, cut_off_steps=PAUSE_FACTOR)
    ends = [*(stage.start for stage in found[1:]), history.end]
    for stage, end in zip(found, ends, strict=True):
        yield Span(Layer.BASE, stage.start, end, stage.category, stage.incident_id)


def _blocked_spans(generation: Generation, steps: Sequence[Span]) -> Iterator[Span]:
    """Time blocked in save. The log tells how much of it there was between two reports, not when: it is laid at the
    ends of the steps of that window, in proportion to their length."""
    if not generation.blocked or not generation.steps:
        return
    before = BlockedSample(generation.began_at if generation.began_at is not None else -math.inf, 0.0)
    coming = 0
    for sample in generation.blocked:
        while coming < len(steps) and steps[coming].end <= before.at:
            coming += 1
        pieces = []
        for index in range(coming, len(steps)):  # a slice would copy all that follows, for every sample
            span = steps[index]
            if span.start >= sample.at:
                break
            pieces.append((max(span.start, before.at), min(span.end, sample.at)))
        available = sum(end - start for start, end in pieces)
        blocked = min(sample.total_s - before.total_s, available)
        if blocked > 0:
            for start, end in pieces:
                yield Span(Layer.BLOCKED, end - (end - start) * blocked / available, end, Category.CHECKPOINT_BLOCKED)
        before = sample


def _evaluation_spans(history: History, step_s: float | None) -> Iterator[Span]:
    """Evaluations of any rank: the others wait for it. One ends at the latest where the next step must have begun, or
    with the fault or incident that cut it off; without any of these nobody knows how long it took."""
    for generation in history.generations:
        for entered, left in generation.evaluations:
            next_step = next((s.at - (step_s or 0.0) for s in generation.steps if s.at > entered), None)
            opened = next((i.opened_at for i in history.incidents if i.opened_at > entered), None)
            fault = next((f for f in history.faults if f > entered), None) if left is None else None
            ends = [end for end in (left, next_step, opened, fault) if end is not None]
            if ends:
                yield Span(Layer.EVALUATION, entered, min(ends), Category.EVALUATION)
