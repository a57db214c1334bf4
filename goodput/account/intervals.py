"""Turns a job's history into intervals that are exclusive and exhaustive.

Three layers of spans cover [start, end]: the control plane's stage (the base, one stage at any moment), the steps above
it, and above those whatever interrupted a step or held it up (a straggler, a wait for data, a blocking save, an
evaluation). A sweep over all boundaries takes the highest span of every piece. Pieces share their boundaries, so they
always sum to the elapsed time; a piece without a span is `unknown`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import fsum
from typing import NamedTuple

import msgspec

from goodput.account.categories import Category
from goodput.account.stages import TrainingPause, stages
from goodput.account.steps import (
    PAUSE_FACTOR,
    Executed,
    executed_steps,
    median_step_s,
    settled_spans,
    steady_step_s,
    step_spans,
    windows,
)
from goodput.account.sweep import Interval, Layer, Span, sweep
from goodput.account.waits import wait_spans
from goodput.history.facts import Break, History, LoggedGeneration


class Timeline(msgspec.Struct, frozen=True):
    """The intervals partition [start, end], without the time in which nobody ran the job."""

    intervals: tuple[Interval, ...]
    executed: tuple[Executed, ...]  # of the job's whole time
    step_s: float | None  # the median step; None before two consecutive steps
    start: float
    end: float
    not_running_s: float = 0.0


def timeline(history: History, *, from_at: float | None = None, to_at: float | None = None) -> Timeline:
    """The intervals of a job's elapsed time, or of its part in [from_at, to_at].

    A part is computed from the whole log, so its intervals do not depend on where it is cut.
    """
    start = history.start if from_at is None else min(max(history.start, from_at), history.end)
    end = history.end if to_at is None else max(min(history.end, to_at), start)
    executed = executed_steps(history.generations)
    step_s = median_step_s(executed)
    window = windows(history.generations)
    intervals = _at_capacity(
        sweep(all_spans(history, executed, step_s), start, end), tuple(_shrunk(history.generations, window))
    )
    breaks = [Break(max(start, pause.since), min(end, pause.until)) for pause in history.breaks]
    breaks = [pause for pause in breaks if pause.since < pause.until]
    return Timeline(
        intervals=tuple(_without(intervals, breaks)),
        not_running_s=fsum(pause.until - pause.since for pause in breaks),
        executed=tuple(executed),
        step_s=step_s,
        start=start,
        end=end,
    )


def all_spans(history: History, executed: Sequence[Executed], step_s: float | None) -> Iterator[Span]:
    """Yield the spans of all layers."""
    window = windows(history.generations)
    capacity = {generation.generation: generation.capacity for generation in history.generations}
    steps, pauses = step_spans(history.generations, executed, steady_step_s(executed, step_s, capacity))
    yield from _base_spans(history, pauses)
    yield from chain(*steps.values(), wait_spans(history, steps, step_s, window), settled_spans(executed, window))


def _without(intervals: Iterable[Interval], breaks: Sequence[Break]) -> Iterator[Interval]:
    """Cut the breaks out. Both are in order of time."""
    coming = 0
    for interval in intervals:
        start = interval.start
        while coming < len(breaks) and breaks[coming].until <= start:
            coming += 1
        place = coming
        while place < len(breaks) and breaks[place].since < interval.end:
            if start < breaks[place].since:
                yield interval._replace(start=start, end=breaks[place].since)
            start = max(start, breaks[place].until)
            place += 1
        if start < interval.end:
            yield interval._replace(start=start)


def _base_spans(history: History, pauses: Iterable[TrainingPause]) -> Iterator[Span]:
    found = stages(history, pauses, cut_off_steps=PAUSE_FACTOR)
    ends = [*(stage.start for stage in found[1:]), history.end]
    for stage, end in zip(found, ends, strict=True):
        yield Span(Layer.BASE, stage.start, end, stage.category, stage.incident_id)


class _Shrunk(NamedTuple):
    """A generation below full size: the window of its steps, and when they were completed."""

    lower: float
    upper: float
    capacity: float
    incident_id: str  # the one that shrunk the job
    completed: list[float]


def _shrunk(generations: Iterable[LoggedGeneration], window: Mapping[int, tuple[float, float]]) -> Iterator[_Shrunk]:
    """In order of time."""
    capacity, cause = 1.0, ""
    for generation in generations:
        if generation.capacity < capacity:
            cause = generation.incident_id
        capacity = generation.capacity
        if capacity < 1.0:
            lower, upper = window[generation.generation]
            yield _Shrunk(lower, upper, capacity, cause, [step.at for step in generation.steps])


def _at_capacity(intervals: Iterable[Interval], shrunk: Sequence[_Shrunk]) -> Iterator[Interval]:
    """Split the useful time of a job on reduced capacity: of every step the missing share is lost to the incident
    that shrunk the job."""
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
    """Yield the useful share of each step, then the lost share."""
    completed = generation.completed
    cuts = completed[bisect_right(completed, start) : bisect_left(completed, end)]
    for until in (*cuts, end):
        useful_until = start + (until - start) * generation.capacity
        if start < useful_until:
            yield Interval(start, useful_until, Category.USEFUL, "")
        if useful_until < until:
            yield Interval(useful_until, until, Category.REDUCED_CAPACITY, generation.incident_id)
        start = max(start, until)
