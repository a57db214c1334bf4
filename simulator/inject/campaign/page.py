"""The report of a campaign as one HTML file: it opens offline, loads nothing, and runs no script. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from simulator.inject.campaign.outcome import CampaignReport, FaultOutcome, FaultVerdict

_STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 48px; color: #1b1f24;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 19px; margin: 32px 0 8px; }
.about { color: #57606a; } .measures { display: flex; flex-wrap: wrap; gap: 10px; margin: 20px 0 0; }
.measures div { border: 1px solid #d7dbe0; border-radius: 6px; padding: 8px 12px; min-width: 110px; }
.measures dt { font-size: 13px; color: #57606a; } .measures dd { margin: 0; font-size: 21px; font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-bottom: 1px solid #d7dbe0; }
th { font-size: 12.5px; color: #57606a; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #1f5fa8; height: 9px; margin-top: 6px; } .failed td { background: #fdeceb; }
.scroll { overflow-x: auto; } code { font-size: 13px; }
"""


def to_html(report: CampaignReport, *, command: str) -> str:
    """The whole page. `command` runs the same faults again."""
    failures = report.failures
    headline = (
        f"{len(failures)} of {len(report.faults)} faults were missed or handled wrong"
        if failures
        else f"All {len(report.faults)} faults were handled"
        if report.faults
        else "No fault was injected"
    )
    began = datetime.fromtimestamp(report.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    early = f" It ended early: {escape(report.ended_early)}." if report.ended_early else ""
    measures = "".join(f"<div><dt>{escape(name)}</dt><dd>{count}</dd></div>" for name, count in _measures(report))
    failed = (
        "<h2>Missed or handled wrong</h2><ul>"
        + "".join(f"<li>{escape(f'{f.number}. {f.fault}, {f.target}: {f.verdict}. {f.why}')}</li>" for f in failures)
        + "</ul>"
        if failures
        else ""
    )
    longest_s = max((f.recovered_s for f in report.faults), default=0.0)
    rows = "".join(_row(fault, longest_s) for fault in report.faults)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Faults injected into {escape(report.job)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(headline)}</h1>
<p class="about">Job {escape(report.job)}, {began}, {report.ended_at - report.began_at:.0f} s. Mix {escape(report.mix)},
{report.rate_per_h:g} faults per hour, seed {report.seed}.{early}</p>
<dl class="measures">{measures}</dl>
{failed}
<h2>Faults</h2>
<div class="scroll"><table><thead><tr><th class="n">#</th><th>fault</th><th>target</th><th>verdict</th>
<th>detected as</th><th class="n">after (s)</th><th>decisions</th><th class="n">recovered (s)</th>
<th class="n">steps lost</th></tr></thead><tbody>{rows}</tbody></table></div>
<h2>The same faults again</h2><p><code>{escape(command)}</code></p>
</body></html>
"""


def _measures(report: CampaignReport) -> list[tuple[str, str]]:
    recovered = sorted(f.recovered_s for f in report.faults if f.verdict is FaultVerdict.RECOVERED)
    detected = sorted(f.detected_s for f in report.faults if f.detected_s >= 0)
    return [
        *((name, str(count)) for name, count in report.summary().items()),
        ("median detection", f"{_median(detected):.1f} s" if detected else "-"),
        ("median recovery", f"{_median(recovered):.1f} s" if recovered else "-"),
    ]


def _median(ascending: list[float]) -> float:
    return (ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2


def _row(fault: FaultOutcome, longest_s: float) -> str:
    bar_percent = 100 * max(0.0, fault.recovered_s) / longest_s if longest_s > 0 else 0.0
    stands_for = f"<br><small>{escape(fault.stands_for)}</small>" if fault.stands_for else ""
    why = f"<br><small>{escape(fault.why)}</small>" if fault.why else ""
    seen = ", ".join(filter(None, (fault.detected_as, *fault.incident_ids)))
    marked = " class='failed'" if fault.verdict.is_failure else ""
    return (
        f"<tr{marked}><td class='n'>{fault.number}</td>"
        f"<td>{escape(fault.fault)}{stands_for}</td><td>{escape(fault.target) or '-'}</td>"
        f"<td>{escape(fault.verdict.value)}{why}</td><td>{escape(seen) or '-'}</td>"
        f"<td class='n'>{_seconds(fault.detected_s)}</td>"
        f"<td>{escape(', '.join(d.replace('_', ' ') for d in fault.decisions)) or '-'}</td>"
        f"<td class='n'>{_seconds(fault.recovered_s)}<div class='bar' style='width:{bar_percent:.0f}%'></div></td>"
        f"<td class='n'>{fault.lost_steps}</td></tr>"
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 0 else "-"
