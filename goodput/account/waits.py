"""Whatever interrupts steps or lies within them: blocking saves, evaluations, data waits and stragglers. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from goodput.account.categories import Category
from goodput.account.sweep import Layer, Span
from goodput.history.facts import History, LoggedGeneration, WaitSample
from goodput.history.phases import PhaseSpan, Waiting
from goodput.history.rank_clocks import STRAGGLER_SHARE

# All ranks wait a little for their data; one that waits this many times their average is the cause.
CULPRIT_FACTOR = 2.0

_SPANS = {
    Waiting.DATA: (Layer.DATA, Category.DATA_WAIT),
    Waiting.CHECKPOINT: (Layer.BLOCKED, Category.CHECKPOINT_BLOCKED),
    Waiting.OTHER: (Layer.DATA, Category.UNKNOWN),
}


def wait_spans(
    history: History,
    steps: Mapping[int, Sequence[Span]],
    step_s: float | None,
    windows: Mapping[int, tuple[float, float]],
) -> Iterator[Span]:
    """All spans above the steps. `steps`: each generation's spans, ascending; `windows`: when each generation
    counts."""
    opened = [incident.opened_at for incident in history.incidents]
    for generation in history.generations:
        lower, upper = windows[generation.generation]
        lower = max(lower, generation.settled_until)
        log = _Moments(generation, opened, history.faults, step_s)
        within = [*_evaluation_spans(log), *_longest_waits(log, Waiting.OTHER), *_straggler_spans(log)]
        for waiting in (Waiting.CHECKPOINT, Waiting.DATA):
            if _logs_each_wait(generation, waiting):
                within += _longest_waits(log, waiting)
            else:
                within += _total_waits(generation, steps.get(generation.generation, ()), waiting)
        for span in within:
            if span.start < upper and span.end > lower:
                yield span._replace(start=max(span.start, lower), end=min(span.end, upper))


class _Moments:
    """A generation, and what bounds the spans within it."""

    def __init__(
        self, generation: LoggedGeneration, opened: Sequence[float], faults: Sequence[float], step_s: float | None
    ) -> None:
        self.generation = generation
        self.completed = [step.at for step in generation.steps]
        self.opened = opened
        self.faults = faults
        self.step_s = step_s

    def next_step_began(self, moment: float) -> float | None:
        """The latest moment at which the first step completed after `moment` began."""
        at = _after(self.completed, moment)
        return None if at is None else at - (self.step_s or 0.0)


def _after(moments: Sequence[float], moment: float) -> float | None:
    index = bisect_right(moments, moment)
    return moments[index] if index < len(moments) else None


def _evaluation_spans(log: _Moments) -> Iterator[Span]:
    """Evaluations of any rank: the others wait for it.

    An evaluation ends at the latest when the next step must have begun, or with the fault or incident that cut it off.
    Without any of these its duration is unknown. An incident that training outlives does not cut off an evaluation with
    a logged end.
    """
    for entered, left, _, _ in log.generation.phases.get(Waiting.EVALUATION, ()):
        fault = _after(log.faults, entered) if left is None else None
        next_step = log.next_step_began(entered)
        incident = _after(log.opened, entered) if left is None or next_step is None else None
        ends = [left, next_step, incident, fault]
        known = [end for end in ends if end is not None]
        if known:
            yield Span(Layer.EVALUATION, entered, min(known), Category.EVALUATION)


class _Longest(NamedTuple):
    """The rank that waited longest in a step, and when."""

    seconds: float
    rank: int
    host_id: str
    pieces: tuple[tuple[float, float], ...]


def _longest_waits(log: _Moments, waiting: Waiting) -> Iterator[Span]:
    """For every step, the waits of the rank that waited longest: in lock step the others' waits lie within.

    That rank's host is named if it waited much longer than the ranks' average.
    """
    by_rank: defaultdict[int, list[PhaseSpan]] = defaultdict(list)
    for span in log.generation.phases.get(waiting, ()):
        by_rank[span.rank].append(span)
    longest: dict[int, _Longest] = {}
    total_s: defaultdict[int, float] = defaultdict(float)
    for rank, spans in by_rank.items():
        waits: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            for place, start, end in _by_step(log, span):
                waits[place].append((start, end))
        for place, pieces in waits.items():
            seconds = math.fsum(end - start for start, end in pieces)
            total_s[place] += seconds
            found = _Longest(seconds, rank, spans[0].host_id, tuple(pieces))
            if place not in longest or longest[place] < found:
                longest[place] = found
    layer, category = _SPANS[waiting]
    for place, found in longest.items():
        alone = waiting is Waiting.DATA and found.seconds * len(by_rank) > CULPRIT_FACTOR * total_s[place]
        for start, end in found.pieces:
            yield Span(layer, start, end, category, host_id=found.host_id if alone else "")


def _by_step(log: _Moments, span: PhaseSpan) -> Iterator[tuple[int, float, float]]:
    """The parts of a rank's wait in each step, by index: a rank may be ahead of the last one by part of a step.

    A phase in which the world completes several steps is not a wait: the log lacks the phases after it.
    """
    completed = log.completed
    first = bisect_right(completed, span.entered)
    if span.left is None:
        end = log.next_step_began(span.entered)
    else:
        end = span.left if bisect_left(completed, span.left) - first < 2 else None
    if end is None:
        return
    incident_at = _after(log.opened, span.entered)
    if incident_at is not None:
        end = min(end, incident_at)
    start = span.entered
    for place in range(first, len(completed)):
        if start >= end:
            return
        until = min(end, completed[place])
        if start < until:
            yield place, start, until
        start = max(start, until)


def _logs_each_wait(generation: LoggedGeneration, waiting: Waiting) -> bool:
    """Whether to use the ranks' phases. A control plane that sums up data waits logs phases only around evaluations."""
    return bool(generation.phases.get(waiting)) and not (waiting is Waiting.DATA and generation.waited.get(waiting))


def _total_waits(generation: LoggedGeneration, steps: Sequence[Span], waiting: Waiting) -> Iterator[Span]:
    """Place waits of which only totals are logged.

    Between two samples the log has the amount, not the times. The waits are placed at the ends of the steps in between,
    those for data at their beginnings, in proportion to the steps' lengths.
    """
    samples = generation.waited.get(waiting)
    if not samples or not generation.steps:
        return
    layer, category = _SPANS[waiting]
    before = WaitSample(generation.began_at if generation.began_at is not None else -math.inf, 0.0)
    coming = 0
    for sample in samples:
        while coming < len(steps) and steps[coming].end <= before.at:
            coming += 1
        pieces = []
        for index in range(coming, len(steps)):  # a slice would copy the rest for every sample
            span = steps[index]
            if span.start >= sample.at:
                break
            pieces.append((max(span.start, before.at), min(span.end, sample.at)))
        available = sum(end - start for start, end in pieces)
        share = min((sample.total_s - before.total_s) / available, 1.0) if available > 0 else 0.0
        if share > 0:
            for start, end in pieces:
                waited_s = (end - start) * share
                if waiting is Waiting.DATA:
                    yield Span(layer, start, start + waited_s, category)
                else:
                    yield Span(layer, end - waited_s, end, category)
        before = sample


def _straggler_spans(log: _Moments) -> Iterator[Span]:
    """From the median rank's completion of a step to the last rank's.

    If an incident opened meanwhile, only the step's own duration counts here. A generation's first step is part of its
    start-up.
    """
    step_s = log.step_s
    if step_s is None:
        return
    place = 0
    for last in log.generation.last_ranks:
        while log.generation.steps[place].step != last.step:
            place += 1
        at = log.completed[place]
        if place == 0 or at - last.median_at <= STRAGGLER_SHARE * step_s:
            continue
        before = log.completed[place - 1]
        incident_at = _after(log.opened, before)
        start = max(last.median_at, before)
        if incident_at is not None and incident_at < at:
            start = max(start, at - step_s)
        yield Span(Layer.STRAGGLER, start, at, Category.STRAGGLER, host_id=last.host_id)
