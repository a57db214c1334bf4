"""The figures of the HTML report, made with plotly. Every bar has a pattern and a label besides its colour."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go

from goodput.account import categories
from goodput.account.categories import Category
from goodput.account.timeline_bins import TimelineBin
from goodput.calculator import GoodputReport
from goodput.wording import percent, seconds, words

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK = "#1b1f24"
GRID = "#d7dbe0"
MAX_LABELLED_INCIDENTS = 30  # more marks are drawn without their numbers


class CategoryGroup(NamedTuple):
    """Categories that the timeline shows as one."""

    name: str
    categories: frozenset[str]
    colour: str
    pattern: str


LOOKS = {
    "useful": ("#1f5fa8", ""),
    "recomputed": ("#d55e00", "/"),
    "held": ("#56a3d9", "."),
    "deciding": ("#cc79a7", "x"),
    "restarting": ("#e69f00", "\\"),
    "no-hosts": ("#7a8490", "-"),
    "unknown": ("#ffffff", "+"),
}
# The waterfall and the table have each category.
GROUPS = tuple(CategoryGroup(group.words, group.categories, *LOOKS[group.name]) for group in categories.GROUPS)

LOST = CategoryGroup("not useful", frozenset(), "#e69f00", "/")


def waterfall(report: GoodputReport) -> go.Figure:
    """From the elapsed time down to the useful time, one bar per category, the largest loss first."""
    unit, unit_s = _unit(report.elapsed_s)
    useful_s = report.seconds_by_category[Category.USEFUL]
    lost = sorted(
        ((c, s) for c, s in report.seconds_by_category.items() if c != Category.USEFUL and s > 0),
        key=lambda item: -item[1],
    )
    bars = [("elapsed", 0.0, report.elapsed_s)]
    until_s = report.elapsed_s
    for category, spent_s in lost:
        bars.append((words(category), until_s - spent_s, until_s))
        until_s -= spent_s
    bars.append(("useful", 0.0, useful_s))
    names = [name for name, _, _ in bars]
    figure = go.Figure()
    for group, name, shown in ((GROUPS[0], "time", (0, len(bars) - 1)), (LOST, "loss", range(1, len(bars) - 1))):
        figure.add_bar(
            orientation="h",
            y=[names[i] for i in shown],
            base=[bars[i][1] / unit_s for i in shown],
            x=[(bars[i][2] - bars[i][1]) / unit_s for i in shown],
            name=name,
            marker=filled(group, outline=True),
            hoverinfo="skip",
        )
    # Each loss begins where the one above it ends.
    edges: list[float | None] = []
    for _, start_s, end_s in bars[:-1]:
        edges += [(start_s or end_s) / unit_s] * 2 + [None]
    figure.add_scatter(
        x=edges,
        y=[name for pair in pairwise(names) for name in (*pair, None)],
        mode="lines",
        line={"color": INK, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    # Put the label where there is room: beside the bar, away from the nearer end of the axis.
    to_left = [end_s > report.elapsed_s / 2 for _, _, end_s in bars]
    wide = [end_s - start_s > report.elapsed_s / 2 for _, start_s, end_s in bars]
    figure.add_scatter(
        x=[
            (start_s if left and not is_wide else end_s) / unit_s
            for (_, start_s, end_s), left, is_wide in zip(bars, to_left, wide, strict=True)
        ],
        y=names,
        mode="text",
        text=[
            f" {seconds(end_s - start_s)} ({percent((end_s - start_s) / (report.elapsed_s or 1.0))}) "
            for _, start_s, end_s in bars
        ],
        textposition=["middle left" if left else "middle right" for left in to_left],
        textfont={"color": ["#ffffff" if is_wide else INK for is_wide in wide]},
        hoverinfo="skip",
    )
    figure.update_layout(barmode="overlay", bargap=0.35)
    figure.update_xaxes(title=f"time ({unit})", range=[0, (report.elapsed_s or 1.0) / unit_s * 1.02])
    figure.update_yaxes(
        autorange="reversed",
        title="",
        showgrid=False,
        categoryorder="array",
        categoryarray=names,
        ticks="",
        ticklabelstandoff=6,
    )
    return laid_out(figure, height_px=80 + 28 * len(names), legend=False)


def run_timeline(report: GoodputReport, bins: Sequence[TimelineBin]) -> go.Figure:
    """The use of every slice of the run, and when its incidents began."""
    figure = go.Figure()
    if bins:
        at = [_moment(b.at + b.seconds / 2) for b in bins]
        width_ms = [1000.0 * b.seconds for b in bins]
        for group in GROUPS:
            shares = [
                100.0 * sum(s for c, s in b.seconds_by_category.items() if c in group.categories) / b.seconds
                for b in bins
            ]
            if not any(shares):
                continue
            figure.add_bar(
                x=at,
                y=shares,
                width=width_ms,
                name=group.name,
                marker=filled(group),
                hovertemplate=f"%{{x}}<br>{group.name}: %{{y:.1f}}%<extra></extra>",
            )
    began = [(n, i) for n, i in enumerate(report.incidents, 1) if i.began_at is not None]
    if began:
        figure.add_scatter(
            x=[_moment(i.began_at or 0.0) for _, i in began],
            y=[104.0] * len(began),
            mode="markers+text" if len(began) <= MAX_LABELLED_INCIDENTS else "markers",
            text=[str(n) for n, _ in began],
            textposition="top center",
            cliponaxis=False,
            name="incident (its number in the table)",
            marker={"symbol": "triangle-down", "size": 10, "color": INK},
            customdata=[f"{n}: {plain(words(i.cause))}, {seconds(i.badput_s)} lost" for n, i in began],
            hovertemplate="%{x}<br>incident %{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(title="time (UTC)", range=[_moment(report.started_at), _moment(report.ended_at)])
    figure.update_yaxes(title="share of the slice (%)", range=[0, 118], tickvals=[0, 25, 50, 75, 100])
    return laid_out(figure, height_px=400, legend=True)


def over_time(report: GoodputReport) -> go.Figure:
    """Goodput up to every moment, and goodput and ETTR over the rolling window."""
    points = report.rolling
    at = [_moment(point.at) for point in points]
    window = seconds(report.ettr_window.window_s) if report.ettr_window else "window"
    figure = go.Figure()
    for name, values, dash, width, colour in (
        ("goodput since the start", [p.cumulative_goodput for p in points], "solid", 3, GROUPS[0].colour),
        (f"goodput, last {window}", [p.goodput for p in points], "dash", 2, GROUPS[1].colour),
        (f"ETTR, last {window}", [p.ettr for p in points], "dot", 2, INK),
    ):
        figure.add_scatter(
            x=at,
            y=[100.0 * value for value in values],
            mode="lines",
            name=name,
            line={"dash": dash, "width": width, "color": colour},
            hovertemplate=f"%{{x}}<br>{name}: %{{y:.2f}}%<extra></extra>",
        )
    figure.update_xaxes(title="time (UTC)", range=[_moment(report.started_at), _moment(report.ended_at)])
    figure.update_yaxes(title="share of the time (%)", range=[0, 103])
    return laid_out(figure, height_px=340, legend=True)


def filled(group: CategoryGroup, *, outline: bool = False) -> dict[str, Any]:
    """A colour with a pattern over it, for readers who cannot distinguish the colours."""
    pattern = {"shape": group.pattern, "fillmode": "overlay", "fgcolor": INK, "fgopacity": 0.75, "size": 6}
    return {
        "color": group.colour,
        "line": {"width": 1 if outline else 0, "color": INK},
        "pattern": pattern | {"solidity": 0.2},
    }


def plain(name: str) -> str:
    """Escape a name from a log for plotly, which interprets some markup."""
    return html.escape(name)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _unit(length_s: float) -> tuple[str, float]:
    """A unit that gives a length of time a readable number."""
    for unit, unit_s in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if length_s >= 3 * unit_s:
            return unit, unit_s
    return "seconds", 1.0


def laid_out(figure: go.Figure, *, height_px: int, legend: bool) -> go.Figure:
    """The figure in the style of all pages."""
    above = {"orientation": "h", "x": 0, "y": 1.03, "yanchor": "bottom", "traceorder": "normal"}
    figure.update_layout(
        template="none",
        font={"family": FONT, "size": 13, "color": INK},
        height=height_px,
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        showlegend=legend,
        legend=above,
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True, ticks="outside", fixedrange=False)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, fixedrange=True)
    return figure
