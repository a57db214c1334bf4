"""Times of a scenario from a measured run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flyball.cli.demo.command import DemoResult
from flyball.cli.demo.reference import LossComparison
from flyball.cli.simulate.calibrate import calibration
from flyball.contracts.errors import UsageError
from simulator.fleet import scenario
from simulator.fleet.result import simulate
from simulator.planning.calibration import from_demo, from_report, in_words


def _part(mean_s: float | None, count: int = 4) -> dict[str, Any]:
    return {"mean_s": mean_s, "median_s": mean_s, "p90_s": mean_s, "p99_s": mean_s, "count": count}


DEMO = {
    "faults": [  # a daemon has seen the kill long before the controller hears of it
        {"fault": "kill", "detected_s": 0.005, "decided_s": 0.02},
        {"fault": "kill", "detected_s": 0.005, "decided_s": -1.0},
        {"fault": "hang", "decided_s": 6.0},
    ],
    "repair": {
        "stop": _part(0.4),
        "restart": _part(2.0),
        "warm_up": _part(0.5),
        "restore": _part(0.1),
        "detect": _part(9.0),
    },
}


def test_the_demos_times_replace_the_scenarios() -> None:
    found = from_demo(DEMO, "demo.json")
    assert found.settings == ("times.notice_s=0.02", "times.stop_s=0.4", "times.start_s=2.5", "times.restore_s=0.1")
    times = scenario.load("small", found.settings).times
    assert (times.notice_s, times.stop_s, times.start_s, times.restore_s) == (0.02, 0.4, 2.5, 0.1)
    told = "\n".join(in_words(found))
    assert "times.start_s = 2.500s, median restart and warm up of 4 repairs" in told
    assert "not checkpoint.save_s" in told


def test_a_setting_goes_over_a_measured_time() -> None:
    assert scenario.load("small", [*from_demo(DEMO, "").settings, "times.start_s=9"]).times.start_s == 9.0


def test_what_was_not_measured_is_not_taken() -> None:
    found = from_demo({"faults": [], "repair": {"stop": _part(0.4), "restore": _part(None, 0)}}, "demo.json")
    assert found.settings == ("times.stop_s=0.4",)
    assert "times.restore_s: not measured" in found.left


def test_a_result_without_times_is_refused() -> None:
    with pytest.raises(UsageError, match="older release"):
        from_demo({"faults": []}, "demo.json")
    with pytest.raises(UsageError, match="nothing to take"):
        from_demo({"faults": [], "repair": {}}, "demo.json")


@pytest.mark.parametrize(
    ("demo", "named"),
    [
        ({"faults": [{"fault": "kill"}], "repair": {}}, "faults[0] is a kill without decided_s"),
        ({"faults": [{"fault": "kill", "decided_s": "x"}], "repair": {}}, "$.faults[0].decided_s"),
        ({"faults": [], "repair": {"stop": 3}}, "$.repair"),
    ],
)
def test_a_demo_that_was_edited_is_refused(demo: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)) as refused:
        from_demo(demo, "demo.json")
    assert "demo.json" in refused.value.message


def test_a_part_of_a_report_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text('{"seconds_by_category": {}}')
    with pytest.raises(UsageError, match=r"report\.json is no goodput report: .*missing required field"):
        calibration(str(report))


def test_the_demo_writes_what_is_taken() -> None:
    report = simulate(scenario.load("small", ["days=1"]), 1, "small").result.goodput
    losses = LossComparison(matches=True, compared=1, recomputed=0, problems=())
    demo = DemoResult(1, (), losses, report.goodput, {}, dict(report.repair), 1).to_json()
    fields = {time.field for time in from_demo(demo, "demo.json").taken}
    assert fields == {"times.stop_s", "times.start_s", "times.restore_s"}


def test_a_runs_own_report_gives_its_times_back() -> None:
    chosen = scenario.load("small", ["days=2", "times.start_s=33", "times.stop_s=2", "checkpoint.save_s=0.3"])
    found = from_report(simulate(chosen, 1, "small").result.goodput, "the report")
    taken = {time.field: time.seconds for time in found.taken}
    assert taken["times.notice_s"] == pytest.approx(0.05, abs=0.01)
    assert taken["times.start_s"] == pytest.approx(33.0, rel=0.1)
    assert taken["times.stop_s"] == pytest.approx(2.0, rel=0.5)
    assert taken["checkpoint.save_s"] == pytest.approx(0.3, rel=0.05)
