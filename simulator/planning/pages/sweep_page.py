"""The HTML page of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import plotly.graph_objects as go

from goodput.show.html_figures import INK
from goodput.wording import counted
from simulator.fleet.scenario import FleetScenario
from simulator.planning.goal import Goal, Prices
from simulator.planning.pages.plan_page import PlanFigure, PlanTable, drawn, losses_figure, plan_page
from simulator.planning.paired import Estimate
from simulator.planning.sweep import Sweep, SweptPoint
from simulator.planning.wording import change, span, value

MAX_BARS, MAX_LINES = 24, 8
_COLOURS = ("#1f5fa8", "#d55e00", "#009e73", "#cc79a7", "#7a8490", "#e69f00", "#56a3d9", INK)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
_WIDE = 20.0  # from this ratio of the largest to the smallest value on, the axis is logarithmic


def to_html(found: Sweep, best: FleetScenario, prices: Prices) -> str:
    """The whole page. `best`: the scenario of the best point."""
    winner = found.points[found.best]
    seeds = f"{counted(len(found.seeds), 'seed')} from {found.seeds[0]} on"
    fields = [axis.field for axis in found.axes]
    over = f" with {', '.join(found.settings)}" if found.settings else ""
    return plan_page(
        heading=f"Best for {found.scenario}: {' and '.join(winner.settings)}",
        about=f"{found.scenario}{over}: {len(found.points)} combinations, each with {seeds}, for {best.days:g} days.",
        answer=found.answer,
        notes=[],
        headline=list(_headline(found, winner, prices)),
        figures=list(_figures(found, prices)),
        tables=[
            PlanTable(
                "All combinations",
                (
                    *fields,
                    "useful",
                    "95 %",
                    _cost_name(prices),
                    "to the best",
                    "95 %",
                    "job failed",
                ),
                tuple(_rows(found)),
                "Differences to the best are taken by seed. Where the difference may be 0, a row may be as good.",
            )
        ],
        outcomes=[outcome for point in found.points for outcome in point.outcomes],
        scenarios=[best],
        version=found.version,
    )


def _cost_name(prices: Prices) -> str:
    return "cost of a useful GPU hour" if prices.known else "GPU hours paid for a useful one"


def _headline(found: Sweep, winner: SweptPoint, prices: Prices) -> Iterator[tuple[str, str, str]]:
    for axis, chosen in zip(found.axes, winner.values, strict=True):
        yield chosen, axis.field, f"best of {', '.join(axis.values)}"
    yield value(winner.useful.mean, "share"), "useful", _interval(winner.useful)
    paid = f"{winner.useful_hour_cost.mean:,.4f}"
    yield paid, _cost_name(prices), "with the spares"
    worst = min(found.points, key=lambda point: point.useful.mean)
    yield value(worst.useful.mean, "share"), "useful, at worst", " and ".join(worst.settings)


def _interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return "one seed: not sure"
    return f"95 %: {value(found.low, 'share')} to {value(found.high, 'share')}"


def _rows(found: Sweep) -> Iterator[tuple[str, ...]]:
    unit = "share" if found.goal is Goal.GOODPUT else "ratio"
    for point in found.points:
        behind = point.behind_best
        yield (
            *point.values,
            value(point.useful.mean, "share"),
            _interval(point.useful).removeprefix("95 %: "),
            f"{point.useful_hour_cost.mean:,.4f}",
            "best" if behind is None else change(behind.mean, unit),
            "" if behind is None else span(behind, unit),
            f"{point.failed} of {len(point.outcomes)}" if point.failed else "",
        )


def _figures(found: Sweep, prices: Prices) -> Iterator[PlanFigure]:
    others = {point.values[1:] for point in found.points}
    if len(others) <= MAX_LINES:
        is_cost = found.goal is Goal.COST
        yield PlanFigure(
            f"{_cost_name(prices) if is_cost else 'Useful share'} by {found.axes[0].field}",
            drawn("curve", _curve(found, prices), legend=len(others) > 1),
            "Means over the seeds; bars: 95 % confidence of each mean. The seeds are the same everywhere, so "
            "differences between points are surer than the bars. The star is the best.",
        )
    if len(found.points) <= MAX_BARS:
        names = [", ".join(point.values) for point in found.points]
        losses = [
            (
                fmean(outcome.down for outcome in point.outcomes),
                fmean(outcome.recomputed for outcome in point.outcomes),
                fmean(outcome.saving for outcome in point.outcomes),
            )
            for point in found.points
        ]
        title = ", ".join(axis.field for axis in found.axes)
        yield PlanFigure(
            "Where the rest of the time went",
            drawn("losses", losses_figure(names, losses, title), legend=True),
            "Means over the seeds.",
        )


def _curve(found: Sweep, prices: Prices) -> go.Figure:
    figure = go.Figure()
    is_cost, first = found.goal is Goal.COST, found.axes[0]
    numbers = _numbers(first.values)
    lines = list(dict.fromkeys(point.values[1:] for point in found.points))
    scale = 1.0 if is_cost else 100.0
    for number, line in enumerate(lines):
        points = [point for point in found.points if point.values[1:] == line]
        shown = [point.useful_hour_cost if is_cost else point.useful for point in points]
        halves = [0.0 if one.high is None else scale * (one.high - one.mean) for one in shown]
        figure.add_scatter(
            x=[numbers[point.values[0]] for point in points] if numbers else [point.values[0] for point in points],
            y=[scale * one.mean for one in shown],
            error_y={"type": "data", "array": halves, "thickness": 1, "width": 4},
            mode="lines+markers",
            name=", ".join(f"{axis.field}={text}" for axis, text in zip(found.axes[1:], line, strict=True)),
            line={"color": _COLOURS[number], "dash": _DASHES[number], "width": 2},
            marker={"size": 7},
            hovertemplate="%{x}: %{y:.3f}<extra></extra>",
        )
    winner = found.points[found.best]
    best = winner.useful_hour_cost if is_cost else winner.useful
    figure.add_scatter(
        x=[numbers[winner.values[0]] if numbers else winner.values[0]],
        y=[scale * best.mean],
        mode="markers",
        name="best",
        marker={"symbol": "star", "size": 17, "color": INK},
        hoverinfo="skip",
    )
    figure.update_xaxes(title=first.field, type="category")
    if numbers:
        positive = min(numbers.values()) > 0
        is_wide = positive and max(numbers.values()) / min(numbers.values()) >= _WIDE
        ticks = sorted(numbers.values())
        figure.update_xaxes(type="log" if is_wide else "linear", tickvals=ticks, ticktext=[f"{one:g}" for one in ticks])
    figure.update_yaxes(title=_cost_name(prices) if is_cost else "useful share of the time (%)")
    return figure


def _numbers(values: tuple[str, ...]) -> dict[str, float]:
    """The values as numbers; empty if one is not."""
    try:
        return {text: float(text) for text in values}
    except ValueError:
        return {}
