"""The HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

import plotly.graph_objects as go

from goodput.wording import counted
from simulator.fleet.scenario import FleetScenario
from simulator.planning.comparison import ComparedMeasure, SimulationComparison
from simulator.planning.pages.plan_page import (
    A_COLOUR,
    B_COLOUR,
    PlanFigure,
    PlanTable,
    band,
    drawn,
    losses_figure,
    plan_page,
)
from simulator.planning.wording import change, named, span, value


def to_html(found: SimulationComparison, a: FleetScenario, b: FleetScenario) -> str:
    """The whole page. `a` and `b`: the scenarios that ran."""
    seeds = f"{counted(len(found.seeds), 'seed')} from {found.seeds[0]} on"
    return plan_page(
        heading=found.answer.partition(":")[0].partition(" (95 %")[0],
        about=f"A: {named(found.a)}. B: {named(found.b)}. Each ran with {seeds}, for {a.days:g} days.",
        answer=found.answer,
        notes=found.notes,
        headline=list(_headline(found)),
        figures=[
            PlanFigure(
                "Seed by seed",
                drawn("seeds", _by_seed(found), legend=False),
                "Useful share of B less that of A, in points: one mark per seed. Line and band: the mean, and where it "
                "lies with 95 % confidence. Above 0, B is better.",
            ),
            PlanFigure(
                "Where the rest of the time went",
                drawn("losses", _losses(found), legend=True),
                "Means over the seeds.",
            ),
        ],
        tables=[
            PlanTable("Measures", ("mean over the seeds", "A", "B", "B - A", "95 % of B - A"), tuple(_rows(found))),
            PlanTable("What differs", ("field", "A", "B"), tuple(_differences(a, b))),
            PlanTable(
                "Each seed",
                ("seed", "useful, A", "useful, B", "B - A", "interruptions, A", "interruptions, B"),
                tuple(_seeds(found)),
            ),
        ],
        outcomes=(*found.a.outcomes, *found.b.outcomes),
        scenarios=(a, b),
        version=found.version,
    )


def _headline(found: SimulationComparison) -> Iterator[tuple[str, str, str]]:
    useful = found.useful
    yield value(useful.a.mean, "share"), "useful, A", "of the time becomes training that counts"
    yield value(useful.b.mean, "share"), "useful, B", "of the time becomes training that counts"
    points = change(useful.difference.mean, "share").removesuffix(" points")
    yield points, "useful, B - A, points", f"95 %: {span(useful.difference, 'share')}"
    for measure in found.measures[4:]:
        text = change(measure.difference.mean, measure.unit)
        yield text, f"{measure.name}, B - A", f"95 %: {span(measure.difference, measure.unit)}"


def _rows(found: SimulationComparison) -> Iterator[tuple[str, ...]]:
    for measure in found.measures:
        yield _row(measure)


def _row(measure: ComparedMeasure) -> tuple[str, ...]:
    unit, difference = measure.unit, measure.difference
    return (
        measure.name,
        value(measure.a.mean, unit),
        value(measure.b.mean, unit),
        change(difference.mean, unit),
        span(difference, unit),
    )


def _seeds(found: SimulationComparison) -> Iterator[tuple[str, ...]]:
    for one, two in zip(found.a.outcomes, found.b.outcomes, strict=True):
        yield (
            str(one.seed),
            value(one.useful, "share"),
            value(two.useful, "share"),
            change(two.useful - one.useful, "share"),
            str(one.interruptions),
            str(two.interruptions),
        )


def _differences(a: FleetScenario, b: FleetScenario) -> Iterator[tuple[str, str, str]]:
    """The fields of two scenarios that differ; causes by their names."""
    one, two = a.model_dump(mode="json"), b.model_dump(mode="json")
    for section in one:
        if section in ("about", "sources", "assumptions"):
            continue
        left, right = (_named(side[section]) for side in (one, two))
        for name in dict.fromkeys((*left, *right)):
            if left.get(name) != right.get(name):
                label = f"{section}.{name}" if name else section
                yield label, _text(left.get(name)), _text(right.get(name))


def _named(section: object) -> dict[str, object]:
    if isinstance(section, dict):
        return section
    if isinstance(section, list):  # causes
        return {str(cause["name"]): {key: kept for key, kept in cause.items() if kept} for cause in section}
    return {"": section}


def _text(found: object) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{key}={kept}" for key, kept in found.items() if key != "name")
    return "-" if found is None else f"{found:g}" if isinstance(found, float) else str(found)


def _by_seed(found: SimulationComparison) -> go.Figure:
    figure = go.Figure()
    pairs = zip(found.a.outcomes, found.b.outcomes, strict=True)
    points = [100.0 * (two.useful - one.useful) for one, two in pairs]
    figure.add_scatter(
        x=[str(seed) for seed in found.seeds],
        y=points,
        mode="markers",
        marker={"size": 11, "color": [B_COLOUR if point >= 0 else A_COLOUR for point in points]},
        hovertemplate="seed %{x}: %{y:.3f} points<extra></extra>",
    )
    difference = found.useful.difference
    low, high = (100.0 * (difference.mean if end is None else end) for end in (difference.low, difference.high))
    band(figure, low, high, 100.0 * difference.mean)
    figure.update_xaxes(title="seed", type="category")
    figure.update_yaxes(title="B - A (points)")
    return figure


def _losses(found: SimulationComparison) -> go.Figure:
    by_name = {measure.name: measure for measure in found.measures}
    parts = [by_name[name] for name in ("down", "recomputed", "saving")]
    first, second = ((p.a.mean for p in parts), (p.b.mean for p in parts))
    one, two = tuple(first), tuple(second)
    return losses_figure(["A", "B"], [(one[0], one[1], one[2]), (two[0], two[1], two[2])], "")
