"""What a sweep found: each point's figures over the seeds, and which points are best. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import msgspec

from flyball import __version__
from goodput.wording import counted
from simulator.planning import paired
from simulator.planning.goal import Goal, Prices, cost, cost_of_useful_hour, score
from simulator.planning.grid import Axis, Point
from simulator.planning.outcome import RunOutcome
from simulator.planning.paired import Estimate

SCHEMA = "flyball.simulation.sweep.v1"


class SweptPoint(msgspec.Struct, frozen=True):
    """A point, and its runs with the seeds of all points, in their order."""

    values: tuple[str, ...]
    settings: tuple[str, ...]
    outcomes: tuple[RunOutcome, ...]
    useful: Estimate
    useful_hour_cost: Estimate  # of a useful GPU hour; GPU hours without prices
    behind_best: Estimate | None  # the goal's difference to the best point, paired by seed; None: it is the best
    is_as_good: bool  # it cannot be told apart from the best
    failed: int  # seeds with which the policy gave the job up


class Sweep(msgspec.Struct, frozen=True):
    """A sweep's result."""

    schema: str
    version: str
    answer: str
    scenario: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    goal: Goal
    axes: tuple[Axis, ...]
    points: tuple[SweptPoint, ...]
    best: int  # its place in `points`


def sweep_of(
    *,
    name: str,
    settings: Sequence[str],
    axes: Sequence[Axis],
    points: Sequence[Point],
    outcomes: Sequence[Sequence[RunOutcome]],
    prices: Prices,
    goal: Goal,
) -> Sweep:
    """The result. `outcomes`: of each point, by seed."""
    scored = [[score(goal, prices)(outcome) for outcome in of_point] for of_point in outcomes]
    means = [paired.estimate(values).mean for values in scored]
    best = means.index(max(means))
    found = []
    for number, (point, of_point) in enumerate(zip(points, outcomes, strict=True)):
        behind = None if number == best else paired.difference(scored[best], scored[number])
        found.append(
            SweptPoint(
                values=point.values,
                settings=point.settings,
                outcomes=tuple(of_point),
                useful=paired.estimate([outcome.useful for outcome in of_point]),
                useful_hour_cost=paired.estimate([cost_of_useful_hour(outcome, prices) for outcome in of_point]),
                behind_best=behind,
                is_as_good=behind is None or not behind.excludes_zero,
                failed=sum(outcome.failed_at_s is not None for outcome in of_point),
            )
        )
    return Sweep(
        schema=SCHEMA,
        version=__version__,
        answer=_answer(axes, found, best, goal, prices),
        scenario=name,
        settings=tuple(settings),
        seeds=tuple(outcome.seed for outcome in outcomes[0]),
        goal=goal,
        axes=tuple(axes),
        points=tuple(found),
        best=best,
    )


def _answer(axes: Sequence[Axis], points: Sequence[SweptPoint], best: int, goal: Goal, prices: Prices) -> str:
    winner = points[best]
    text = f"Best of {len(points)}: {' and '.join(winner.settings)}, with {100 * winner.useful.mean:.2f} % useful"
    if goal is Goal.COST:
        text += f" and {_paid(winner, prices)}"
    if winner.failed:
        text += f" (although the policy gave the job up with {counted(winner.failed, 'seed')})"
    others = sorted(
        (point for point in points if point.is_as_good and point is not winner), key=lambda point: -point.useful.mean
    )
    if winner.useful.seeds == 1:
        return f"{text}. With one seed this is not sure: take more, with --seeds."
    if not others:
        return f"{text}. Every other point is worse, with 95 % confidence."
    names = "; ".join(_short(axes, point) for point in others[:5])
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return f"{text}. Not told apart from it with {winner.useful.seeds} seeds: {names}{more}."


def _short(axes: Sequence[Axis], point: SweptPoint) -> str:
    name = point.values[0] if len(axes) == 1 else " and ".join(point.settings)
    return f"{name} ({100 * point.useful.mean:.2f} %)"


def _paid(point: SweptPoint, prices: Prices) -> str:
    paid = point.useful_hour_cost.mean
    return f"{paid:,.3f} for a useful GPU hour" if prices.known else f"{paid:.4f} GPU hours paid for a useful one"


def to_csv(found: Sweep, prices: Prices) -> str:
    """One row per point and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = ("useful", "recomputed", "saving", "down", "interruptions", "lost_gpu_hours", "spares_left", "digest")
    writer.writerow([*(axis.field for axis in found.axes), "seed", *figures, "cost", "failed_at_s"])
    writer.writerows(_rows(found, figures, prices))
    return text.getvalue()


def _rows(found: Sweep, figures: Sequence[str], prices: Prices) -> Iterator[list[object]]:
    for point in found.points:
        for outcome in point.outcomes:
            failed = "" if outcome.failed_at_s is None else outcome.failed_at_s
            values = (getattr(outcome, figure) for figure in figures)
            yield [*point.values, outcome.seed, *values, cost(outcome, prices) if prices.known else "", failed]
