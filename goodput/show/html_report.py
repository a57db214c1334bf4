"""A report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from goodput.account.measures import Quantiles
from goodput.account.timeline_bins import TimelineBin
from goodput.calculator import GoodputReport, IncidentReport
from goodput.show.html_figures import over_time, run_timeline, waterfall
from goodput.show.page import embedded, environment, moment
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
    shown, hidden = _incidents(report.incidents)
    return (
        environment()
        .get_template("report.html")
        .render(
            report=report,
            source=source,
            left_out=left_out,
            heading=heading or f"Goodput of {report.job or 'an unnamed run'}",
            preface=preface or "",
            assumptions=assumptions,
            figures={
                "waterfall": embedded("waterfall", waterfall(report)),
                "timeline": embedded("timeline", run_timeline(report, timeline)) if timeline else None,
                "over_time": embedded("over-time", over_time(report)) if report.rolling else None,
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
    )


def _headline(report: GoodputReport) -> list[tuple[str, str, str]]:
    """Value, name and meaning of each figure."""
    lost_s = report.elapsed_s - report.seconds_by_category["useful"]
    lost_cost = ""
    if report.cost is not None and report.elapsed_s > 0:
        lost_cost = f"; it cost {report.cost * lost_s / report.elapsed_s:,.2f}"
    return [
        (percent(report.goodput), "goodput", "of the elapsed time went into steps that were kept"),
        (percent(report.ettr), "ETTR", "effective training time ratio, with evaluation and saving"),
        (seconds(report.elapsed_s), "elapsed", f"from {moment(report.started_at)}"),
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
