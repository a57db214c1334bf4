"""A report as one self-contained HTML file: it opens offline, prints well, and is readable without colour.

plotly's script is included once, which makes the file about 5 MB. Names in logs are untrusted: the template escapes
everything, figures get escaped labels, and the page's content security policy forbids loading anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from goodput.account.measures import Quantiles
from goodput.account.timeline_bins import TimelineBin
from goodput.calculator import GoodputReport, IncidentReport
from goodput.show.html_figures import over_time, run_timeline, waterfall
from goodput.wording import counted, percent, seconds

MAX_INCIDENTS = 500  # rows: those that lost most time, in order of time
MAX_HOSTS = 20


def to_html(
    report: GoodputReport,
    timeline: Sequence[TimelineBin],
    *,
    source: str,
    left_out: int = 0,
    heading: str = "",
    preface: Markup | None = None,
    assumptions: Sequence[str] = (),
) -> str:
    """The whole page. `source` names the origin of the events; `left_out` is the number of malformed lines in it.
    `heading`, `preface` (below the measures) and `assumptions` are those of a page about more than the account."""
    environment = Environment(
        loader=PackageLoader("goodput.show"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": seconds,
        "percent": percent,
        "words": lambda name: str(name).replace("_", " "),
        "moment": _moment,
        "gpu_hours": lambda value: "-" if value is None else f"{value:,.1f}",
        "money": lambda value: "-" if value is None else f"{value:,.2f}",
    }
    shown, hidden = _incidents(report.incidents)
    return environment.get_template(
        "report.html"
    ).render(
        report=report,
        source=source,
        left_out=left_out,
        heading=heading or f"Goodput of {report.job or 'an unnamed run'}",
        preface=preface or "",
        assumptions=assumptions,
        plotly_js=Markup(get_plotlyjs()),  # plotly's own script
        figures={
            "waterfall": _figure("waterfall", waterfall(report)),
            "timeline": _figure("timeline", run_timeline(report, timeline)) if timeline else None,
            "over_time": _figure("over-time", over_time(report)) if report.rolling else None,
        },
        headline=_headline(report),
        categories=_shares(report.seconds_by_category, report),
        causes=_shares(report.badput_s, report),
        hosts=_shares(report.badput_by_host, report)[:MAX_HOSTS],
        failure_classes=_shares(report.badput_by_failure_class, report),
        incidents=shown,
        incidents_hidden=hidden,
        repair=_repair(report.repair),
    )


def _figure(name: str, figure: go.Figure) -> Markup:
    """A div and the call that fills it; plotly writes no character in it that could end the script."""
    text = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config={"displaylogo": False, "displayModeBar": False, "responsive": True},
    )
    return Markup(text)


def _headline(report: GoodputReport) -> list[tuple[str, str, str]]:
    """Value, name and meaning of each figure."""
    lost_s = report.elapsed_s - report.seconds_by_category["useful"]
    lost_cost = ""
    if report.cost is not None and report.elapsed_s > 0:
        lost_cost = f"; it cost {report.cost * lost_s / report.elapsed_s:,.2f}"
    return [
        (percent(report.goodput), "goodput", "of the elapsed time went into steps that were kept"),
        (percent(report.ettr), "ETTR", "effective training time ratio, with evaluation and saving"),
        (seconds(report.elapsed_s), "elapsed", f"from {_moment(report.started_at)}"),
        (seconds(lost_s), "not useful", f"elapsed time less useful time{lost_cost}"),
        (str(report.interruptions), "interruptions", f"{counted(len(report.incidents), 'incident')} in all"),
        (seconds(report.mttr_s), "MTTR", "mean time from a fault to the first step after it"),
        (seconds(report.mttf_s), "MTTF", "mean running time per interruption"),
    ]


def _shares(spent: Mapping[str, float], report: GoodputReport) -> list[dict[str, Any]]:
    """Rows, largest first. A running job occupies all its GPUs, so GPU-hours are proportional to time."""
    rows = []
    for name, spent_s in sorted(spent.items(), key=lambda item: (-item[1], item[0])):
        if spent_s <= 0:
            continue
        share = spent_s / report.elapsed_s if report.elapsed_s > 0 else None
        rows.append(
            {
                "name": name,
                "seconds": spent_s,
                "share": share,
                "gpu_hours": None if report.gpu_hours is None or share is None else share * report.gpu_hours,
                "cost": None if report.cost is None or share is None else share * report.cost,
            }
        )
    return rows


def _incidents(incidents: Sequence[IncidentReport]) -> tuple[list[tuple[int, IncidentReport]], int]:
    """Incidents numbered as in the figure: at most MAX_INCIDENTS, those that lost most time; and how many are left
    out."""
    numbered = list(enumerate(incidents, 1))
    worst = sorted(numbered, key=lambda item: -item[1].badput_s)[:MAX_INCIDENTS]
    return sorted(worst, key=lambda item: item[0]), len(numbered) - len(worst)


def _repair(repair: Mapping[str, Quantiles]) -> list[tuple[str, Quantiles]]:
    return [(part, found) for part, found in repair.items() if found.count and found.p99_s]


def _moment(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
