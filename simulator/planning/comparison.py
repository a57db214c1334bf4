"""Compares two scenarios that ran with the same seeds: how much better one is, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from flyball import __version__
from goodput.wording import counted
from simulator.planning import paired
from simulator.planning.goal import Prices, cost, cost_of_useful_hour
from simulator.planning.outcome import RunOutcome
from simulator.planning.paired import Estimate

SCHEMA = "flyball.simulation.comparison.v1"
_MANY_SEEDS = 1000  # more are not worth recommending


class Side(msgspec.Struct, frozen=True):
    """One of the two scenarios. `settings` were set over its file."""

    label: str  # "A" or "B"
    scenario: str
    settings: tuple[str, ...]
    outcomes: tuple[RunOutcome, ...]  # in the order of the seeds


class ComparedMeasure(msgspec.Struct, frozen=True):
    """A figure of both sides, and B's less A's, paired by seed."""

    name: str
    unit: str  # "share", "count", "hours", "money", "ratio"
    a: Estimate
    b: Estimate
    difference: Estimate


class SimulationComparison(msgspec.Struct, frozen=True):
    """Confidence intervals are Student's t, 95 %, of the differences by seed."""

    schema: str
    version: str
    answer: str
    seeds: tuple[int, ...]
    a: Side
    b: Side
    measures: tuple[ComparedMeasure, ...]
    notes: tuple[str, ...]

    @property
    def useful(self) -> ComparedMeasure:
        return self.measures[0]


def compare(a: Side, b: Side, prices: Prices) -> SimulationComparison:
    """Compare outcomes of the same seeds."""
    seeds = tuple(outcome.seed for outcome in a.outcomes)
    assert seeds == tuple(outcome.seed for outcome in b.outcomes)
    measures = tuple(
        ComparedMeasure(
            name,
            unit,
            paired.estimate(one := [figure(outcome) for outcome in a.outcomes]),
            paired.estimate(two := [figure(outcome) for outcome in b.outcomes]),
            paired.difference(one, two),
        )
        for name, unit, figure in _figures(prices)
    )
    return SimulationComparison(
        schema=SCHEMA,
        version=__version__,
        answer=_answer(measures[0]),
        seeds=seeds,
        a=a,
        b=b,
        measures=measures,
        notes=tuple(_notes(a, b, measures)),
    )


def _figures(prices: Prices) -> Iterator[tuple[str, str, Callable[[RunOutcome], float]]]:
    yield "useful", "share", lambda outcome: outcome.useful
    yield "recomputed", "share", lambda outcome: outcome.recomputed
    yield "saving", "share", lambda outcome: outcome.saving
    yield "down", "share", lambda outcome: outcome.down
    yield "interruptions", "count", lambda outcome: float(outcome.interruptions)
    yield "lost GPU hours", "hours", lambda outcome: outcome.lost_gpu_hours
    if prices.known:
        yield "cost", "money", lambda outcome: cost(outcome, prices)
        yield "cost of a useful GPU hour", "money", lambda outcome: cost_of_useful_hour(outcome, prices)
    else:
        yield "GPU hours paid for a useful one", "ratio", lambda outcome: cost_of_useful_hour(outcome, prices)


def _answer(useful: ComparedMeasure) -> str:
    """The sentence that a planner wants."""
    difference, a, b = useful.difference, useful.a.mean, useful.b.mean
    shares = f"{100 * b:.1f} % of the time becomes training with B, and {100 * a:.1f} % with A"
    if difference.low is None or difference.high is None:
        return f"With one seed nothing is sure: {shares}. Take more, with --seeds."
    if difference.low == difference.high == 0.0:
        return f"A and B came out the same with every seed: {100 * a:.1f} % of the time becomes training."
    better, sign = ("B", 1.0) if difference.mean > 0 else ("A", -1.0)
    mean, ends = 100 * sign * difference.mean, sorted((100 * sign * difference.low, 100 * sign * difference.high))
    digits = _digits(ends[1] - ends[0])
    span = f"(95 %: {ends[0]:.{digits}f} to {ends[1]:.{digits}f})"
    if difference.excludes_zero:
        return f"{better} is better by {mean:.{digits}f} points {span}: {shares}."
    text = f"A and B cannot be told apart: {better} is {mean:.{digits}f} points better {span}, and {shares}."
    wanted = paired.seeds_to_see(difference)
    if wanted is not None and wanted <= _MANY_SEEDS:
        text += f" If that is the true difference, about {wanted} seeds would show it."
    return text


def _digits(width_points: float) -> int:
    """Decimals that leave an interval of this width two digits."""
    return 1 if width_points >= 0.5 else 2 if width_points >= 0.05 else 3


def _notes(a: Side, b: Side, measures: Sequence[ComparedMeasure]) -> Iterator[str]:
    by_name: Mapping[str, ComparedMeasure] = {measure.name: measure for measure in measures}
    for side in (a, b):
        failed = [outcome.seed for outcome in side.outcomes if outcome.failed_at_s is not None]
        if failed:
            seeds = ", ".join(map(str, failed))
            count = counted(len(failed), "seed")
            yield f"The policy gave {side.label}'s job up with {count} ({seeds}): the time after that is down."
    parts = ("recomputed", "saving", "down")
    largest = max(parts, key=lambda name: abs(by_name[name].difference.mean))
    moved = by_name[largest].difference
    if abs(moved.mean) >= 5e-5:
        yield f"Most of the difference is {largest}: {'less' if moved.mean < 0 else 'more'} of it in B."
