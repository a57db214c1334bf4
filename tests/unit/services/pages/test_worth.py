"""What /goodput draws: the numbers of the report, in the right places."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.jobs.goodput_runs import interrupted_run

from goodput.account.categories import GROUPS, Category
from goodput.account.timeline_bins import binned
from goodput.calculator import analyse
from goodput.comparison import compare
from goodput.show.report import to_json
from services.dashboard import worth
from services.dashboard.rendering import duration, points

ANALYSIS = analyse(interrupted_run())
LINE = ANALYSIS.timeline
REPORT = to_json(ANALYSIS.report) | {"timeline": msgspec.to_builtins(binned(LINE.intervals, LINE.start, LINE.end, 100))}


def places(row: dict[str, Any]) -> tuple[float, float]:
    """Where the bars of a row begin and end."""
    edges = [(float(bar["x"][:-1]), float(bar["x"][:-1]) + float(bar["width"][:-1])) for bar in row["bars"]]
    return min(left for left, _ in edges), max(right for _, right in edges)


def test_each_category_is_in_one_group_with_a_look() -> None:
    assert sorted(category for group in GROUPS for category in group.categories) == sorted(Category)
    assert len(GROUPS) <= 8


def test_the_waterfall_goes_from_the_elapsed_to_the_useful_time() -> None:
    shown_s = worth.zoom_s(REPORT)
    elapsed, *losses, useful = worth.waterfall(REPORT, shown_s)
    assert {row["name"]: pytest.approx(row["seconds"]) for row in losses} == REPORT["badput_s"]
    assert elapsed["seconds"] == pytest.approx(useful["seconds"] + sum(row["seconds"] for row in losses))
    assert [row["seconds"] for row in losses] == sorted((row["seconds"] for row in losses), reverse=True)
    assert places(elapsed) == (0.0, 100.0)
    for above, below in zip([elapsed, *losses[:3]], losses[:4], strict=True):
        assert places(below)[1] == pytest.approx(places(above)[0] if above is not elapsed else 100.0, abs=0.01)
    assert places(useful)[0] == 0.0 and places(useful)[1] == pytest.approx(places(losses[-1])[0], abs=0.3)
    assert 20.0 < places(useful)[1] < 30.0 and shown_s < 0.2 * REPORT["elapsed_s"], "small losses are shown larger"
    assert {"useful", "recomputed", "restarting"} <= {group.name for group in worth.groups_of([*losses, useful])}
    with_all_of_it = worth.waterfall(REPORT, REPORT["elapsed_s"])
    assert places(with_all_of_it[-1])[1] == pytest.approx(100.0 * REPORT["goodput"], abs=0.01)


def test_many_causes_are_summed_and_large_losses_are_not_zoomed() -> None:
    causes = [{"cause": f"c{n}", "category": "restart", "seconds": 100.0 - n} for n in range(20)]
    lost_s = sum(cause["seconds"] for cause in causes)
    report = {"elapsed_s": lost_s + 10.0, "losses": causes, "seconds_by_category": {"useful": 10.0}}
    assert worth.zoom_s(report) == report["elapsed_s"]
    rows = worth.waterfall(report, report["elapsed_s"])
    assert len(rows) == worth.MAX_CAUSES + 2 and rows[-2]["name"] == "7 other causes"
    assert sum(row["seconds"] for row in rows[1:-1]) == pytest.approx(lost_s)


@pytest.mark.parametrize("report", [{"elapsed_s": 0.0}, {"elapsed_s": -5.0}, {"elapsed_s": 1e300}])
def test_an_impossible_report_is_drawn_within_the_picture(report: dict[str, Any]) -> None:
    loss = {"cause": "x", "category": "of a later release", "seconds": 3.0}
    report |= {"losses": [loss], "seconds_by_category": {}}
    for row in worth.waterfall(report, worth.zoom_s(report)):
        left, right = places(row)
        assert 0.0 <= left <= right <= 100.001


def test_a_lane_has_the_share_of_each_slice() -> None:
    lanes = worth.lanes(REPORT)
    assert lanes[0]["name"] == "useful"
    assert {lane["name"] for lane in lanes} == {
        name for name, seconds in REPORT["seconds_by_category"].items() if seconds >= worth.SHOWN_S
    }
    slices = [
        {"seconds": 2.0, "seconds_by_category": {"useful": 2.0}},
        {"seconds": 2.0, "seconds_by_category": {"useful": 1.0, "restart": 0.001}},
    ]
    drawn = worth.lanes({"timeline": slices, "seconds_by_category": {"useful": 3.0, "restart": 0.01, "stop": 0.0}})
    assert [lane["path"] for lane in drawn] == ["M0 20v-20.0h1V20zM1 20v-10.0h1V20z", "M1 20v-3.0h1V20z"]
    assert worth.lanes({"seconds_by_category": {"useful": 3.0}}) == [], "an older result has no slices"


def test_incidents_are_marked_where_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = worth.marks(REPORT)
    assert len(marks) == len(REPORT["incidents"]) and all(0.0 <= float(mark["x"][:-1]) <= 100.0 for mark in marks)
    monkeypatch.setattr(worth, "MAX_MARKS", 2)
    assert worth.marks(REPORT) == marks[-2:]


def test_two_runs_side_by_side() -> None:
    other = analyse(interrupted_run(interruptions=1)).report
    found = msgspec.to_builtins(compare(ANALYSIS.report, other))
    useful = next(row for row in worth.side_by_side(found["categories"]) if row["name"] == "useful")
    assert (useful["a_width"], useful["a_share"] > useful["b_share"]) == ("100.000%", True), (
        "the largest fills the width"
    )
    assert float(useful["b_width"][:-1]) == pytest.approx(100.0 * useful["b_share"] / useful["a_share"], abs=0.001)
    assert worth.side_by_side([]) == []
    assert (points(0.031), points(-0.0042), points(-0.000001)) == ("+3.10", "\N{MINUS SIGN}0.42", "0.00")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5.0, "5.00 s"), (245.0, "4 min 5 s"), (12_000.0, "3 h 20 min"), (54.1 * 86_400, "54 d 2 h")]
)
def test_a_duration_is_shown_in_the_units_that_a_person_takes(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
