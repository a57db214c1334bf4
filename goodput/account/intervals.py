"""From a job's history to intervals that are exclusive and exhaustive.

Three layers of spans lie on the axis [start, end]: what the control plane was doing (the base, one stage at any
moment), the steps on top of it, and what interrupted a step or held it up (a straggler, a wait for data, a blocking
save, an evaluation) on top of those. A sweep over all boundaries takes the highest span of every piece. The pieces
share their boundaries, so they sum to the elapsed time whatever the log says; a piece without a span is `unknown`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from goodput.account.categories import Category
from goodput.account.stages import TrainingPause, stages
from goodput.account.steps import (
    PAUSE_FACTOR,
    Executed,
    executed_steps,
    median_step_s,
    steady_step_s,
    step_spans,
    windows,
)
from goodput.account.sweep import Interval, Layer, Span, sweep
from goodput.account.waits import wait_spans
from goodput.history.facts import History, LoggedGeneration


class Timeline(msgspec.Struct, frozen=True):
    """The intervals partition [start, end]."""

    intervals: tuple[Interval, ...]
    executed: tuple[Executed, ...]  # of all the job's time
    step_s: float | None  # the median step, None before two steps in a row
    start: float
    end: float


def timeline(history: History, *, from_at: float | None = None, to_at: float | None = None) -> Timeline:
    """The intervals of a job's elapsed time, or of the part of it in [from_at, to_at]. All of the log has its say about
    a part of the time, so what a part's intervals are does not depend on where it was cut out."""
    start = history.start if from_at is None else min(max(history.start, from_at), history.end)
    end = history.end if to_at is None else max(min(history.end, to_at), start)
    executed = executed_steps(history.generations)
    step_s = median_step_s(executed)
    window = windows(history.generations)
    steps, pauses = step_spans(history.generations, executed, steady_step_s(executed, step_s))
    spans = chain(_base_spans(history, pauses), *steps.values(), wait_spans(history, steps, step_s, window))
    intervals = _at_capacity(sweep(spans, start, end), tuple(_shrunk(history.generations, window)))
    return Timeline(
        intervals=tuple(intervals),
        executed=tuple(executed),
        step_s=step_s,
        start=start,
        end=end,
    )


def _base_spans(history: History, pauses: Iterable[TrainingPause]) -> Iterator[Span]:
    found = stages(history, pauses, cut_off_steps=PAUSE_FACTOR)
    ends = [*(stage.start for stage in found[1:]), history.end]
    for stage, end in zip(found, ends, strict=True):
        yield Span(Layer.BASE, stage.start, end, stage.category, stage.incident_id)


class _Shrunk(NamedTuple):
    """A generation below its job's full size: from when to when its steps count, and when they were completed."""

    lower: float
    upper: float
    capacity: float
    incident_id: str  # that shrunk the job
    completed: list[float]


def _shrunk(generations: Iterable[LoggedGeneration], window: Mapping[int, tuple[float, float]]) -> Iterator[_Shrunk]:
    """In the order of time."""
    capacity, cause = 1.0, ""
    for generation in generations:
        if generation.capacity < capacity:
            cause = generation.incident_id
        capacity = generation.capacity
        if capacity < 1.0:
            lower, upper = window[generation.generation]
            yield _Shrunk(lower, upper, capacity, cause, [step.at for step in generation.steps])


def _at_capacity(intervals: Iterable[Interval], shrunk: Sequence[_Shrunk]) -> Iterator[Interval]:
    """Useful time of a job that runs on fewer hosts than it was made for counts as far as those are: of every step the
    share that is missing is lost to the incident that shrunk the job."""
    coming = 0
    for interval in intervals:
        while coming < len(shrunk) and shrunk[coming].upper <= interval.start:
            coming += 1
        if interval.category is not Category.USEFUL:
            yield interval
            continue
        start, place = interval.start, coming
        while place < len(shrunk) and shrunk[place].lower < interval.end:
            generation = shrunk[place]
            if start < generation.lower:
                yield interval._replace(start=start, end=generation.lower)
                start = generation.lower
            until = min(generation.upper, interval.end)
            yield from _weighted(start, until, generation)
            start = max(start, until)
            place += 1
        if start < interval.end:
            yield interval._replace(start=start)


def _weighted(start: float, end: float, generation: _Shrunk) -> Iterator[Interval]:
    """Each step's useful share, then what was lost of it."""
    completed = generation.completed
    cuts = completed[bisect_right(completed, start) : bisect_left(completed, end)]
    for until in (*cuts, end):
        useful_until = start + (until - start) * generation.capacity
        if start < useful_until:
            yield Interval(start, useful_until, Category.USEFUL, "")
        if useful_until < until:
            yield Interval(useful_until, until, Category.REDUCED_CAPACITY, generation.incident_id)
        start = max(start, until)
