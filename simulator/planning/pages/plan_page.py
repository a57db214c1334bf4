"""The HTML page of a plan: the answer, its figures, its tables, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import plotly.graph_objects as go
from markupsafe import Markup

from goodput.show.html_figures import INK, CategoryGroup, filled, laid_out
from goodput.show.page import embedded, environment
from simulator.fleet.scenario import FleetScenario
from simulator.planning.outcome import RunOutcome

HEIGHT_PX = 330
A_COLOUR, B_COLOUR = "#7a8490", "#1f5fa8"
# Where time went that is not useful, with the colours of the goodput report.
LOSSES = (
    CategoryGroup("down", frozenset(), "#e69f00", "\\"),
    CategoryGroup("recomputed", frozenset(), "#d55e00", "/"),
    CategoryGroup("saving", frozenset(), "#56a3d9", "."),
)


class PlanFigure(msgspec.Struct, frozen=True):
    """A figure, with its title and what it shows."""

    title: str
    drawn: Markup
    caption: str


class PlanTable(msgspec.Struct, frozen=True):
    """A table of text; the first column has names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    about: str = ""


def plan_page(
    *,
    heading: str,
    about: str,
    answer: str,
    notes: Sequence[str],
    headline: Sequence[tuple[str, str, str]],
    figures: Sequence[PlanFigure],
    tables: Sequence[PlanTable],
    outcomes: Iterable[RunOutcome],
    scenarios: Sequence[FleetScenario],
    version: str,
    assumptions: Sequence[str] = (),
) -> str:
    """The whole page. `headline`: value, name and meaning of each figure in a box."""
    return (
        environment("simulator.planning.pages")
        .get_template("plan.html")
        .render(
            heading=heading,
            about=about,
            answer=answer,
            notes=notes,
            violations=list(dict.fromkeys(violation for outcome in outcomes for violation in outcome.violations)),
            headline=headline,
            figures=figures,
            tables=tables,
            assumptions=[*dict.fromkeys(text for scenario in scenarios for text in scenario.assumptions), *assumptions],
            sources=list(dict.fromkeys(text for scenario in scenarios for text in scenario.sources)),
            version=version,
        )
    )


def drawn(name: str, figure: go.Figure, *, legend: bool, height_px: int = HEIGHT_PX) -> Markup:
    """A figure in the style of all pages, as HTML."""
    return embedded(name, laid_out(figure, height_px=height_px, legend=legend))


def losses_figure(names: Sequence[str], losses: Sequence[tuple[float, float, float]], title: str) -> go.Figure:
    """Stacked bars of what was down, recomputed and saving, as shares, for each of `names`."""
    figure = go.Figure()
    for number, group in enumerate(LOSSES):
        figure.add_bar(
            x=list(names),
            y=[100.0 * loss[number] for loss in losses],
            name=group.name,
            marker=filled(group, outline=True),
            hovertemplate=f"%{{x}}<br>{group.name}: %{{y:.2f}}%<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.45 if len(names) < 4 else 0.3)
    figure.update_xaxes(title=title, type="category")
    figure.update_yaxes(title="share of the time (%)", rangemode="tozero")
    return figure


def band(figure: go.Figure, low: float, high: float, mean: float) -> None:
    """A confidence interval and its mean, across the whole figure."""
    figure.add_hrect(y0=low, y1=high, fillcolor=B_COLOUR, opacity=0.14, line_width=0, layer="below")
    figure.add_hline(y=mean, line={"color": B_COLOUR, "width": 2})
    figure.add_hline(y=0.0, line={"color": INK, "width": 1, "dash": "dot"})
