"""The HTML page of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from goodput.show.html_figures import INK
from goodput.wording import seconds
from simulator.fleet.scenario import FleetScenario
from simulator.planning.goal import Goal
from simulator.planning.optimum import Optimum, SearchedField
from simulator.planning.outcome import RunOutcome
from simulator.planning.pages.plan_page import A_COLOUR, B_COLOUR, PlanFigure, PlanTable, drawn, plan_page
from simulator.planning.wording import change, span, value

_TITLES = {
    "checkpoint.every_s": "seconds between two saves",
    "cluster.spares": "spares",
    "checkpoint.replicas": "replicas",
}
_CLOSE = 1.12  # of two values on a logarithmic axis: one label is enough


def to_html(found: Optimum, scenario: FleetScenario, ran: Sequence[RunOutcome]) -> str:
    """The whole page. `scenario`: as it was given; `ran`: every run."""
    over = f" with {', '.join(found.settings)}" if found.settings else ""
    what = "useful time" if found.goal is Goal.GOODPUT else "cost of a useful GPU hour"
    return plan_page(
        heading=f"{found.scenario}: {' and '.join(found.recommended) or 'keep what you have'}",
        about=f"{found.scenario}{over}, {scenario.gpus:,} GPUs for {scenario.days:g} days: the best {what}, from "
        f"{found.runs} runs.",
        answer=found.answer,
        notes=[],
        headline=list(_headline(found)),
        figures=[
            PlanFigure(
                f"{field.field}: {field.chosen}",
                drawn(f"field-{number}", _curve(field, found.goal), legend=True),
                f"Difference to the best mean, by seed, with its 95 % interval: {field.start}. Filled: it may be as "
                "good as the best. Hollow: it is worse.",
            )
            for number, field in enumerate(found.fields)
        ],
        tables=[
            PlanTable(
                field.field,
                ("value", "seeds", "useful", "to the best", "95 %", "", ""),
                tuple(_rows(field, found.goal)),
                f"Candidates: {field.start}.",
            )
            for field in found.fields
        ],
        outcomes=ran,
        scenarios=[scenario],
        assumptions=found.notes,
        version=found.version,
    )


def _headline(found: Optimum) -> Iterator[tuple[str, str, str]]:
    for field in found.fields:
        given = "as it is" if field.chosen == field.given else f"now {field.given}"
        yield field.chosen, field.field, given
    if found.confirmed is not None:
        useful = found.confirmed.useful
        yield value(useful.a.mean, "share"), "useful now", f"mean of {useful.a.seeds} other seeds"
        yield value(useful.b.mean, "share"), "useful with it", f"B - A, 95 %: {span(useful.difference, 'share')}"
    closed = found.closed_form
    yield seconds(closed.mtti_s), "between interruptions", "running time"
    yield seconds(closed.daly_s), "Daly's interval", f"Young's: {seconds(closed.young_s)}"


def _rows(field: SearchedField, goal: Goal) -> Iterator[tuple[str, ...]]:
    unit = "share" if goal is Goal.GOODPUT else "ratio"
    for point in field.points:
        behind = point.behind_best
        yield (
            point.value,
            str(point.seeds),
            value(point.useful.mean, "share"),
            "-" if behind is None else change(behind.mean, unit),
            "" if behind is None else span(behind, unit),
            "chosen" if point.value == field.chosen else "given" if point.value == field.given else "",
            point.mark,
        )


def _curve(field: SearchedField, goal: Goal) -> go.Figure:
    """Each candidate's difference to the best."""
    scale = 100.0 if goal is Goal.GOODPUT else 1.0
    figure = go.Figure()
    x = [float(point.value) for point in field.points]
    means = [0.0 if point.behind_best is None else scale * point.behind_best.mean for point in field.points]
    halves = []
    for point in field.points:
        behind = point.behind_best
        halves.append(0.0 if behind is None or behind.high is None else scale * (behind.high - behind.mean))
    figure.add_scatter(
        x=x,
        y=means,
        error_y={"type": "data", "array": halves, "thickness": 1, "width": 4},
        mode="lines+markers",
        name="candidates",
        line={"color": B_COLOUR, "width": 2},
        marker={"size": 9, "symbol": ["circle" if point.is_as_good else "circle-open" for point in field.points]},
        hovertemplate="%{x}: %{y:.3f}<extra></extra>",
    )
    for name, wanted, symbol, colour in (
        ("given", field.given, "diamond", A_COLOUR),
        ("chosen", field.chosen, "star", INK),
    ):
        places = [number for number, point in enumerate(field.points) if point.value == wanted]
        figure.add_scatter(
            x=[x[place] for place in places],
            y=[means[place] for place in places],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 15, "color": colour},
            hoverinfo="skip",
        )
    is_wide = min(x) > 0.0 and max(x) / min(x) >= 8.0
    ticks = [at for number, at in enumerate(x) if not is_wide or number == 0 or at >= _CLOSE * x[number - 1]]
    figure.update_xaxes(
        title=_TITLES.get(field.field, field.field),
        type="log" if is_wide else "linear",
        tickvals=ticks,
        ticktext=[f"{at:g}" for at in ticks],
    )
    figure.update_yaxes(title="to the best (points)" if goal is Goal.GOODPUT else "to the best (cost)")
    return figure
