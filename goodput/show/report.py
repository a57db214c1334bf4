"""A report as JSON, and as text for a terminal. The text is understandable without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import fsum
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flyball.contracts import wire
from goodput.account.categories import Category
from goodput.account.measures import Quantiles
from goodput.calculator import GoodputReport, IncidentReport
from goodput.wording import counted, percent, seconds, words

_BAR_WIDTH = 24
_NARROWEST = 80  # no table cuts a word then
WORST_HOSTS = 10
# Numbers of categories and incidents on a screen, and whether to show the recommendation; the first that fits is used.
_LIVE = ((99, 5, True), (6, 5, True), (6, 3, False), (6, 1, False), (4, 1, False), (4, 0, False))


def to_json(report: GoodputReport) -> dict[str, Any]:
    """The report as one JSON object of plain dicts and lists. docs/reference/goodput/measures.md documents its fields,
    `schema` names their version."""
    return wire.decoder_of(dict[str, Any]).decode(msgspec.json.encode(report))


def to_text(report: GoodputReport, *, width: int = 100) -> str:
    """The report as plain text."""
    return plain(render(report), width)


def plain(shown: RenderableType, width: int) -> str:
    """What is shown, as text of this width, or as wide as whole words need."""
    console = Console(width=max(width, _NARROWEST), no_color=True, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def render(report: GoodputReport) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [_headline(report), _categories(report)]
    if report.badput_s:
        parts.append(_causes("Time lost, by cause", "cause", report.badput_s, report))
    if report.badput_by_host:
        worst = dict(list(report.badput_by_host.items())[:WORST_HOSTS])
        parts.append(_causes("Worst hosts", "host", worst, report))
    if report.incidents:
        parts.append(_incidents(report.incidents, with_cost=report.cost is not None))
    if any(part.count for part in report.repair.values()):
        parts.append(_repair(report.repair))
    if report.recommendation:
        parts.append(_line(report.recommendation.text + "\n"))
    parts += [_line(f"Note: {note}") for note in report.notes]
    return _spaced(parts)


def render_live(report: GoodputReport, fits: Callable[[RenderableType], bool]) -> RenderableType:
    """The changing parts for a running job: as much as `fits`, but always the headline and the largest categories."""
    shown: RenderableType = ""
    for categories, incidents, with_recommendation in _LIVE:
        parts: list[RenderableType] = [_headline(report), _categories(report, largest=categories)]
        if newest := report.incidents[max(0, len(report.incidents) - incidents) :]:
            parts.append(_incidents(newest, with_cost=report.cost is not None))
        if with_recommendation and report.recommendation:
            parts.append(_line(report.recommendation.text))
        shown = _spaced(parts)
        if fits(shown):
            break
    return shown


def _spaced(parts: Iterable[RenderableType]) -> Group:
    """Add an empty line after every table."""
    return Group(*(Padding(part, (0, 0, 1, 0), expand=False) if isinstance(part, Table) else part for part in parts))


def _line(text: str) -> Text:
    """Names in a log are untrusted: nothing in them may move the cursor."""
    return Text("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _headline(report: GoodputReport) -> Text:
    steps = report.steps
    text = (
        f"Job {report.job or '(unnamed)'}: goodput {percent(report.goodput)}, ETTR {percent(report.ettr)} "
        f"of {seconds(report.elapsed_s)} ({report.outcome or 'running'}){_not_running(report)}\n"
        f"{steps.kept} steps kept, {steps.recomputed} recomputed, a step takes {seconds(steps.median_s)}; "
        f"{counted(report.interruptions, 'interruption')}, MTTR {seconds(report.mttr_s)}, "
        f"MTTF {seconds(report.mttf_s)}\n"
    )
    if report.cost is not None and report.gpu_hours is not None and report.goodput is not None:
        lost = report.cost * (1.0 - report.goodput)
        text += f"{report.gpu_hours:,.1f} GPU-hours, cost {report.cost:,.2f}, of which {lost:,.2f} was lost\n"
    if report.mfu is not None:
        text += f"MFU {percent(report.mfu)} while it trained\n"
    if report.ettr_window is not None:
        found = report.ettr_window
        text += (
            f"ETTR over {seconds(found.window_s)}: {percent(found.last)} now, {percent(found.median)} median, "
            f"{percent(found.min)} minimum\n"
        )
    return _line(text)


def _not_running(report: GoodputReport) -> str:
    away_s = report.not_running_s
    return f"; not counted: {seconds(away_s)} between its runs" if away_s > 0 else ""


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )


def _categories(report: GoodputReport, *, largest: int | None = None) -> Table:
    """All categories; or the useful time, the largest of the rest, and the sum of the others."""
    table = _table("Where the time went")
    table.add_column("category")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    found = sorted(
        ((c, s) for c, s in report.seconds_by_category.items() if s > 0 or c == Category.USEFUL),
        key=lambda item: (item[0] != Category.USEFUL, -item[1]),
    )
    shown, others = found[:largest], found[len(found[:largest]) :]
    if others:
        shown.append((f"{len(others)} others", fsum(spent_s for _, spent_s in others)))
    for category, spent_s in shown:
        share = spent_s / report.elapsed_s if report.elapsed_s > 0 else None
        bar = "#" * round((share or 0.0) * _BAR_WIDTH)
        table.add_row(words(category), seconds(spent_s), percent(share), bar)
    return table


def _causes(title: str, what: str, badput_s: Mapping[str, float], report: GoodputReport) -> Table:
    table = _table(title)
    table.add_column(what, overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    if report.cost is not None:
        table.add_column("cost", justify="right", no_wrap=True)
    for name, lost_s in badput_s.items():
        share = lost_s / report.elapsed_s if report.elapsed_s > 0 else None
        cost = [] if report.cost is None else [_money(None if share is None else share * report.cost)]
        table.add_row(_line(name.replace("_", " ")), seconds(lost_s), percent(share), *cost)
    return table


def _repair(repair: Mapping[str, Quantiles]) -> Table:
    table = _table("Repair, part by part")
    table.add_column("part")
    for column in ("median", "p90", "p99", "mean", "seen"):
        table.add_column(column, justify="right", no_wrap=True)
    for part, found in repair.items():
        if found.count and found.p99_s:
            durations = (found.median_s, found.p90_s, found.p99_s, found.mean_s)
            table.add_row(part.replace("_", " "), *map(seconds, durations), str(found.count))
    return table


def _incidents(incidents: tuple[IncidentReport, ...], *, with_cost: bool) -> Table:
    table = _table("Incidents; times count from the fault (~: from the newest step before it)")
    table.add_column("incident", min_width=10, overflow="fold")  # the longest words: preemption, checkpoint
    for column in ("detected", "decided", "resumed", "lost\nsteps", "time\nlost", *(["cost"] if with_cost else [])):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("decisions", min_width=11, overflow="fold")
    for incident in incidents:
        mark = "~" if incident.began_is_estimate else ""
        times = (incident.detected_s, incident.decided_s, incident.resumed_s)
        table.add_row(
            _line(f"{incident.incident_id}: {incident.cause.replace('_', ' ')}"),
            *(f"{mark}{seconds(t)}" if t is not None else "-" for t in times),
            "-" if incident.lost_steps is None else str(incident.lost_steps),
            seconds(incident.badput_s),
            *([_money(incident.cost)] if with_cost else []),
            _line(", ".join(d.replace("_", " ") for d in incident.decisions) or "-"),
        )
    return table
