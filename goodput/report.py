"""A report as JSON and as text for a terminal. The text needs no colour to be understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from goodput.calculator import IncidentReport, Report
from goodput.categories import Category

_BAR_WIDTH = 24


def to_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object, in plain dicts and lists; docs/goodput.md documents its fields, and `schema`
    names their version."""
    return msgspec.json.decode(msgspec.json.encode(report), type=dict[str, Any])


def to_text(report: Report, *, width: int = 100) -> str:
    """The report as plain text."""
    console = Console(width=width, no_color=True, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def render(report: Report) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [_headline(report), _categories(report)]
    if report.badput_s:
        parts.append(_causes(report.badput_s))
    if report.incidents:
        parts.append(_incidents(report.incidents))
    parts += [Text(f"Note: {note}") for note in report.notes]
    return Group(*parts)


def _headline(report: Report) -> Text:
    steps = report.steps
    return Text(
        f"Job {report.job or '(without a name)'}: goodput {percent(report.goodput)}, ETTR {percent(report.ettr)} "
        f"of {seconds(report.elapsed_s)} ({report.outcome or 'running'})\n"
        f"{steps.kept} steps kept, {steps.recomputed} done again, a step takes {seconds(steps.median_s)}; "
        f"{report.interruptions} interruptions, MTTR {seconds(report.mttr_s)}, MTTF {seconds(report.mttf_s)}\n"
    )


def _categories(report: Report) -> Table:
    table = Table(title="Where the time went", title_justify="left")
    table.add_column("category")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    shown = {c: s for c, s in report.seconds_by_category.items() if s > 0 or c == Category.USEFUL}
    for category, spent_s in sorted(shown.items(), key=lambda item: -item[1]):
        share = spent_s / report.elapsed_s if report.elapsed_s > 0 else None
        bar = "#" * round((share or 0.0) * _BAR_WIDTH)
        table.add_row(category.replace("_", " "), seconds(spent_s), percent(share), bar)
    return table


def _causes(badput_s: Mapping[str, float]) -> Table:
    table = Table(title="Time lost, by cause", title_justify="left")
    table.add_column("cause")
    table.add_column("time", justify="right")
    for cause, lost_s in badput_s.items():
        table.add_row(cause.replace("_", " "), seconds(lost_s))
    return table


def _incidents(incidents: tuple[IncidentReport, ...]) -> Table:
    table = Table(
        title="Incidents; times count from the fault (~ from the newest step before it)", title_justify="left"
    )
    for column in ("incident", "cause"):
        table.add_column(column)
    for column in ("detected", "decided", "resumed", "lost steps", "cost"):
        table.add_column(column, justify="right")
    table.add_column("decisions")
    for incident in incidents:
        mark = "~" if incident.began_is_estimate else ""
        times = (incident.detected_s, incident.decided_s, incident.resumed_s)
        table.add_row(
            incident.incident_id,
            incident.cause.replace("_", " "),
            *(f"{mark}{seconds(t)}" if t is not None else "-" for t in times),
            "-" if incident.lost_steps is None else str(incident.lost_steps),
            seconds(incident.badput_s),
            ", ".join(d.replace("_", " ") for d in incident.decisions) or "-",
        )
    return table


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.2f}%"


def seconds(value: float | None) -> str:
    """A duration that people can read: 0.134s, 12.5s, 3m 20s, 2h 05m."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.3f}s"
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
