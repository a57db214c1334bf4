"""What a search found: the best values, the curves that they are the best of, and how sure that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from flyball import __version__
from goodput.wording import counted
from simulator.planning.comparison import SimulationComparison
from simulator.planning.goal import Goal, Prices
from simulator.planning.paired import Estimate

SCHEMA = "flyball.simulation.optimum.v1"
NEGLIGIBLE = 0.0005  # 0.05 points of useful time, or 0.05 % of the cost: fewer hosts are worth more


class CandidatePoint(msgspec.Struct, frozen=True):
    """A candidate of one field."""

    value: str
    seeds: int
    useful: Estimate
    score: Estimate  # what is maximised: the useful share, or the cost of a useful hour with its sign turned
    behind_best: Estimate | None  # on the seeds that both ran with; None: it is the best
    is_as_good: bool  # it loses next to nothing, or cannot be told apart from the best
    failed: int  # seeds with which the policy gave the job up

    @property
    def mark(self) -> str:
        """What to say of it beside its figures."""
        failed = f"the job failed with {counted(self.failed, 'seed')}" if self.failed else ""
        near = "best mean" if self.behind_best is None else "may be as good" if self.is_as_good else ""
        return ", ".join(filter(None, (near, failed)))


class SearchedField(msgspec.Struct, frozen=True):
    """One field, with the others as they were chosen before. `best` has the best mean; `chosen` may be a smaller value
    that loses next to nothing."""

    field: str
    given: str
    chosen: str
    best: str
    start: str  # where the candidates come from
    points: tuple[CandidatePoint, ...]  # ascending


class ClosedForm(msgspec.Struct, frozen=True):
    """Young's and Daly's save interval, for the rate of interruptions in the first runs. None: there were none."""

    mtti_s: float | None  # running time per interruption
    repair_s: float | None  # time down per interruption
    young_s: float | None
    daly_s: float | None


class Optimum(msgspec.Struct, frozen=True):
    """A search's result."""

    schema: str
    version: str
    answer: str
    scenario: str
    settings: tuple[str, ...]
    goal: Goal
    recommended: tuple[str, ...]  # settings that change something
    closed_form: ClosedForm
    fields: tuple[SearchedField, ...]
    confirmed: SimulationComparison | None  # B: with `recommended`, on seeds that the search did not use
    notes: tuple[str, ...]
    runs: int


def optimum_of(
    *,
    name: str,
    settings: Sequence[str],
    goal: Goal,
    prices: Prices,
    closed: ClosedForm,
    fields: Sequence[SearchedField],
    confirmed: SimulationComparison | None,
    notes: Sequence[str],
    runs: int,
) -> Optimum:
    """The result, with its answer in words."""
    recommended = tuple(f"{field.field}={field.chosen}" for field in fields if field.chosen != field.given)
    return Optimum(
        schema=SCHEMA,
        version=__version__,
        answer=_answer(fields, recommended, confirmed, goal, prices),
        scenario=name,
        settings=tuple(settings),
        goal=goal,
        recommended=recommended,
        closed_form=closed,
        fields=tuple(fields),
        confirmed=confirmed,
        notes=tuple(notes),
        runs=runs,
    )


def _answer(
    fields: Sequence[SearchedField],
    recommended: Sequence[str],
    confirmed: SimulationComparison | None,
    goal: Goal,
    prices: Prices,
) -> str:
    if confirmed is None:
        return f"Keep what you have: nothing better was found. {_how_sure(fields)}"
    gain, unit = _gain(confirmed, goal, prices)
    with_it = " and ".join(recommended)
    span = f"95 %: {_signed(gain.low)} to {_signed(gain.high)}"
    on = f"on {gain.seeds} seeds that the search did not use"
    if gain.low is not None and gain.low > 0.0:
        return f"Set {with_it}: better by {_signed(gain.mean).lstrip('+')} {unit} ({span}) {on}. {_how_sure(fields)}"
    if gain.high is not None and gain.high < 0.0:
        worse = f"by {_signed(-gain.mean).lstrip('+')} {unit}"
        return f"Keep what you have: {with_it} was worse {on}, {worse}. {_how_sure(fields)}"
    fewer = any(float(field.chosen) < float(field.given) for field in fields if field.field != "checkpoint.every_s")
    also = " It needs fewer hosts or copies, though." if fewer else ""
    what = f"{with_it} makes no difference that can be told ({_signed(gain.mean)} {unit}, {span}) {on}"
    return f"{what}.{also} {_how_sure(fields)}"


def _gain(confirmed: SimulationComparison, goal: Goal, prices: Prices) -> tuple[Estimate, str]:
    """How much B is better, in points or in per cent of A's cost; above 0 is better. In points if one is infinite."""
    cost = confirmed.measures[-1]
    if goal is Goal.GOODPUT or not math.isfinite(cost.difference.mean):
        difference, scale, unit = confirmed.useful.difference, 100.0, "points of useful time"
    else:
        difference, scale, unit = cost.difference, -100.0 / cost.a.mean, "% of the cost of a useful GPU hour"
    ends = sorted(scale * end for end in (difference.low or 0.0, difference.high or 0.0))
    return Estimate(scale * difference.mean, ends[0], ends[1], difference.seeds), unit


def _how_sure(fields: Sequence[SearchedField]) -> str:
    """Which other values may be as good, for each field."""
    told = []
    for field in fields:
        others = [point.value for point in field.points if point.is_as_good and point.value != field.chosen]
        near = f" ({', '.join(others)} may be as good)" if others else " (all others are worse, with 95 % confidence)"
        told.append(f"{field.field}={field.chosen}{near}")
    return f"Found: {'; '.join(told)}." if told else ""


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def plain(value: float) -> str:
    """A number as a setting: without digits that say nothing."""
    return f"{value:.6g}"
