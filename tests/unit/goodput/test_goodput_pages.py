"""The report as HTML, CSV and Prometheus metrics, and two reports side by side."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from support.jobs.goodput_runs import interrupted_run

from flyball.contracts.events import Event, EventKind
from goodput.account.options import AccountOptions
from goodput.account.timeline_bins import binned
from goodput.calculator import GoodputReport, analyse, calculate
from goodput.comparison import compare
from goodput.show.csv_report import comparison_csv, report_csv
from goodput.show.exposition import exposition
from goodput.show.html_report import MAX_INCIDENTS, to_html
from goodput.show.report import render_live, to_json, to_text
from goodput.wording import seconds

HOSTILE_JOB = "<script>alert(1)</script>"
HOSTILE_HOSTS = ("</script><img src=x onerror=alert(2)>", '"><svg onload=alert(3)>', "=cmd|' /C calc'!A0")


def page(events: list[Event], **options: float) -> tuple[GoodputReport, str]:
    analysis = analyse(events, options=AccountOptions(**options))  # type: ignore[arg-type]
    report = analysis.report
    bins = binned(analysis.timeline.intervals, report.started_at, report.ended_at, 100)
    return report, to_html(report, bins, source="a.jsonl", left_out=2)


def without_scripts(html: str) -> str:
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_has_everything_and_loads_nothing() -> None:
    report, html = page(interrupted_run(), gpu_hour_price=2.5)
    text = without_scripts(html)
    for title in (
        "From elapsed to useful time",
        "The run",
        "Goodput over time",
        "Incidents",
        "Worst hosts",
        "Recommendation",
        "Assumptions",
    ):
        assert f">{title}<" in text, title
    assert report.recommendation and report.recommendation.text.split(";")[0] in text
    assert "90.63%" in text and "inc-6" in text and "host-b" in text
    assert "2 lines of the log were malformed" in text
    tags = Tags(text).found
    assert not [a for _, a in tags if {"src", "href", "srcset"} & a.keys()], "nothing is loaded from elsewhere"
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "object", "img")]
    policy = next(a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")
    assert "<script src" not in html
    assert len(html) < 5_500_000
    assert "@media print" in html


def test_an_incident_shows_its_lost_time_and_with_a_price_its_cost() -> None:
    events = interrupted_run(interruptions=1, steps_between=20)
    for options, titles in (({}, ["time lost"]), ({"gpu_hour_price": 250.0}, ["time lost", "cost"])):
        report, html = page(events, **options)
        incident = report.incidents[0]
        table = without_scripts(html).partition(">Incidents<")[2].partition("</table>")[0]
        assert [t for t in re.findall(r"<th[^>]*>([^<]+)</th>", table) if t in ("time lost", "cost")] == titles
        assert f">{seconds(incident.badput_s)}<" in table
        text = to_text(report, width=80).partition("Incidents; ")[2].partition("Repair")[0]
        assert "\N{HORIZONTAL ELLIPSIS}" not in text, "nothing is cut off"
        rows = to_text(report, width=10_000).splitlines()
        assert any(f"{incident.incident_id}: " in row and "restart" in row for row in rows)
        words = {word for row in rows for word in row.split() if "─" not in word}
        assert words <= set(to_text(report, width=20).split())
        if incident.cost is not None:
            assert f">{incident.cost:,.2f}<" in table
            assert f"{incident.cost:,.2f}" in text
        assert ("cost" in text) is ("cost" in titles)


def test_every_figure_has_titles_with_units_and_is_readable_without_colour() -> None:
    _, html = page(interrupted_run())
    for axis in ("time (hours)", "time (UTC)", "share of the slice (%)", "share of the time (%)"):
        assert axis in html
    assert len(set(re.findall(r'"shape":"([^"]*)"', html))) >= 6, "patterns beside colours"
    assert {'"dash":"solid"', '"dash":"dash"', '"dash":"dot"'} <= set(re.findall(r'"dash":"\w+"', html))


def test_names_from_logs_are_escaped() -> None:
    _, harmless = page(interrupted_run(job="llama", hosts=("a", "b", "c")))
    _, html = page(interrupted_run(job=HOSTILE_JOB, hosts=HOSTILE_HOSTS))
    assert html.count("<script") == harmless.count("<script")
    assert html.count("</script") == harmless.count("</script")
    assert [tag for tag, _ in Tags(without_scripts(html)).found] == [
        tag for tag, _ in Tags(without_scripts(harmless)).found
    ]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "onerror=alert(2)>" not in html.replace("&gt;", "")


def test_a_cause_is_escaped_in_a_figure() -> None:
    events = interrupted_run()
    events.append(
        Event(events[-1].at - 5.0, EventKind.INCIDENT_OPENED, "llama", incident_id="x", data={"cause": "<b>owned</b>"})
    )
    assert "<b>owned" not in page(events)[1]


def test_an_empty_run_has_a_page() -> None:
    report, html = page([Event(at=5.0, kind=EventKind.JOB_SUBMITTED, job="new")])
    assert report.goodput is None
    assert "Goodput of new" in html
    page([Event(5.0, EventKind.JOB_SUBMITTED, "new"), Event(6.0, EventKind.JOB_ENDED, "new")])


def test_very_many_incidents_are_cut_to_the_worst() -> None:
    report, html = page(interrupted_run(interruptions=MAX_INCIDENTS + 20, steps_between=6, save_every=2, save_s=0.1))
    assert len(report.incidents) == MAX_INCIDENTS + 20
    assert "20 more, which lost less time" in html


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_every_value_is_in_the_csv() -> None:
    report = calculate(interrupted_run(), options=AccountOptions(gpu_hour_price=1.0))
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert list(rows[0]) == ["section", "item", "field", "value"]
    found = {(r["section"], r["item"], r["field"]): r["value"] for r in rows}
    assert float(found["goodput", "", ""]) == report.goodput
    assert float(found["seconds_by_category", "recomputed", ""]) == report.seconds_by_category["recomputed"]
    assert float(found["incidents", "2", "resumed_s"]) == report.incidents[1].resumed_s
    assert float(found["repair", "restart", "p90_s"]) == report.repair["restart"].p90_s
    assert math.fsum(float(r["value"]) for r in rows if r["section"] == "badput_s") == pytest.approx(
        report.elapsed_s - report.seconds_by_category["useful"]
    )
    assert {r["section"] for r in rows} == set(to_json(report)) - {
        name for name, value in to_json(report).items() if value in ([], {})
    }


def test_no_name_becomes_a_formula_in_a_spreadsheet() -> None:
    text = report_csv(calculate(interrupted_run(hosts=HOSTILE_HOSTS[2:], job="=1+1")))
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not [c for c in cells if c.startswith(("=", "@", "+"))]
    assert "'=1+1" in cells


# --- Prometheus ------------------------------------------------------------------------------------------------------


def test_prometheus_can_read_the_metrics() -> None:
    report = calculate(interrupted_run(job='a"b\\c\n'), options=AccountOptions(gpu_hour_price=1.0))
    families = {f.name: f for f in text_string_to_metric_families(exposition([report]))}
    goodput = families["flyball_goodput_ratio"].samples[0]
    assert (goodput.labels, goodput.value) == ({"training_job": 'a"b\\c\n'}, report.goodput)
    by_category = families["flyball_goodput_category_seconds"].samples
    assert math.fsum(s.value for s in by_category) == pytest.approx(report.elapsed_s)
    assert families["flyball_goodput_running"].samples[0].value == 0.0
    assert families["flyball_goodput_cost"].samples[0].value == report.cost
    assert families["flyball_goodput_gpu_seconds"].samples[0].value == pytest.approx(8 * report.elapsed_s)
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert not labels & {"job", "instance"}, "a scrape adds these itself"


def test_a_measure_without_a_value_is_left_out() -> None:
    text = exposition([calculate([Event(at=5.0, kind=EventKind.JOB_SUBMITTED, job="new")])])
    assert "flyball_goodput_ratio{" not in text
    assert 'flyball_goodput_running{training_job="new"} 1.0' in text


# --- two runs --------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side() -> None:
    a, b = calculate(interrupted_run()), calculate(interrupted_run(save_every=20, restart_s=8.0))
    found = compare(a, b)
    measures = {row.name: row for row in found.measures}
    assert measures["goodput"].difference == (b.goodput or 0) - (a.goodput or 0)
    assert measures["mttr_s"].a == a.mttr_s
    assert math.fsum(row.share_difference or 0.0 for row in found.categories) == pytest.approx(0.0, abs=1e-9)
    differences = [abs(row.share_difference or 0.0) for row in found.categories]
    assert differences == sorted(differences, reverse=True)
    assert {"recomputed", "useful"} == {row.name for row in found.categories[:2]}
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert {r["section"] for r in rows} == {
        "measures",
        "categories_s",
        "categories_share",
        "causes_s",
        "causes_share",
    }


def test_a_run_does_not_differ_from_itself() -> None:
    a = calculate(interrupted_run())
    assert not any(row.difference for row in compare(a, a).measures)
    empty = calculate([Event(at=5.0, kind=EventKind.JOB_SUBMITTED, job="new")])
    assert {row.difference for row in compare(a, empty).measures if row.name == "goodput"} == {None}


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_text_has_the_cost_and_the_recommendation() -> None:
    report = calculate(interrupted_run(), options=AccountOptions(gpu_hour_price=2.5))
    shown = " ".join(to_text(report).split())
    assert report.recommendation and report.recommendation.text in shown
    assert "30.4 GPU-hours, cost 76.01, of which 7.12 was lost" in shown
    for word in ("Worst hosts", "host-b", "Repair, part by part", "ETTR over 1h 00m"):
        assert word in shown


def test_a_screen_shows_what_fits_and_always_the_most_important() -> None:
    report = calculate(interrupted_run(steps_between=60, save_every=20), options=AccountOptions(gpu_hour_price=2.5))
    console = Console(width=80)

    def lines(height: int) -> list[str]:
        shown = console.render_lines(render_live(report, lambda shown: len(console.render_lines(shown)) <= height))
        return ["".join(part.text for part in line).rstrip() for line in shown]

    large, usual, small = lines(60), lines(23), lines(5)
    assert any("You save every" in line for line in large) and not any("others" in line for line in large)
    assert len(usual) <= 23
    for word in (" others ", "Incidents;", "inc-6:"):
        assert any(word in line for line in usual), word
    for found in (large, usual, small):
        assert found[0].startswith("Job llama: goodput")
        assert any(line.startswith("useful") for line in found)


def test_the_text_contains_no_terminal_controls() -> None:
    shown = to_text(calculate(interrupted_run(job="a\x1b[2Jb", hosts=("h\x1b]0;x\x07",))))
    assert "\x1b" not in shown and "\x07" not in shown


def test_the_json_is_plain() -> None:
    report = to_json(calculate(interrupted_run()))
    assert json.loads(json.dumps(report)) == report
    assert {"elapsed_s", "goodput", "ettr", "seconds_by_category", "incidents", "mttf_s", "mttr_s"} <= set(report)
    assert report["recommendation"]["save_every_steps"]
