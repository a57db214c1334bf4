"""The report on a small log; test_goodput_schema.py pins the fields."""

from __future__ import annotations

import json
from pathlib import Path

from flyball.contracts.events import Event, EventKind
from goodput.account.categories import Category
from goodput.calculator import calculate
from goodput.show.report import seconds, to_json, to_text

EVENTS = [
    Event(at=0.0, kind=EventKind.JOB_SUBMITTED, job="gpt"),
    Event(at=1.0, kind=EventKind.GENERATION_STARTED, job="gpt", generation=1, data={"restore_step": None}),
    Event(
        at=4.0,
        kind=EventKind.STEPS,
        job="gpt",
        generation=1,
        rank=0,
        data={"first_step": 0, "completed_at": [2.0, 3.0, 4.0]},
    ),
    Event(at=5.0, kind=EventKind.INCIDENT_OPENED, job="gpt", incident_id="inc-1", data={"cause": "worker_killed"}),
    Event(at=5.5, kind=EventKind.DECISION, job="gpt", incident_id="inc-1", data={"kind": "fail_job"}),
    Event(at=6.0, kind=EventKind.JOB_ENDED, job="gpt", data={"outcome": "failed"}),
]


def test_the_json_report() -> None:
    report = to_json(calculate(EVENTS))

    assert json.loads(json.dumps(report)) == report
    (incident,) = report["incidents"]
    expected = {
        "schema": "flyball.goodput.v1",
        "job": "gpt",
        "outcome": "failed",
        "started_at": 0.0,
        "ended_at": 6.0,
        "elapsed_s": 6.0,
        "goodput": 0.5,
        "ettr": 0.5,
        "seconds_by_category": {
            "useful": 3.0,
            "recomputed": 0.0,
            "evaluation": 0.0,
            "checkpoint_blocked": 0.0,
            "data_wait": 0.0,
            "straggler": 0.0,
            "reduced_capacity": 0.0,
            "scheduling": 1.0,
            "detection": 1.0,
            "decision": 0.5,
            "control_plane_away": 0.0,
            "idle_no_hosts": 0.0,
            "stop": 0.0,
            "restart": 0.0,
            "restore": 0.0,
            "warm_up": 0.0,
            "shutdown": 0.5,
            "unknown": 0.0,
        },
        "badput_s": {"worker_killed": 2.0, "scheduling": 1.0},
        "interruptions": 1,
        "mttr_s": None,
        "mttf_s": 3.0,
        "steps": {"kept": 3, "recomputed": 0, "newest": 2, "median_s": 1.0},
        "notes": [],
    }
    assert {name: report[name] for name in expected} == expected
    expected = {
        "incident_id": "inc-1",
        "cause": "worker_killed",
        "outcome": "",
        "began_at": 4.0,
        "began_is_estimate": True,
        "detected_s": 1.0,
        "decided_s": 1.5,
        "resumed_s": None,
        "decisions": ["fail_job"],
        "lost_steps": None,
        "seconds_by_category": {"detection": 1.0, "decision": 0.5, "shutdown": 0.5},
        "badput_s": 2.0,
    }
    assert {name: incident[name] for name in expected} == expected


def test_the_text_report_names_everything() -> None:
    shown = to_text(calculate(EVENTS))

    assert "Job gpt: goodput 50.00%, ETTR 50.00% of 6.000s (failed)" in shown
    for word in ("useful", "detection", "worker killed", "inc-1", "~1.000s", "fail job", "scheduling"):
        assert word in shown
    assert "control plane away" not in shown  # absent categories take no line
    assert "\x1b" not in shown


def test_the_part_of_a_step_that_a_fault_cut_off_is_not_called_recomputed() -> None:
    fault = Event(at=4.5, kind=EventKind.FAULT_INJECTED, job="gpt", data={"fault": "kill"})
    report = calculate([*EVENTS, fault])
    assert report.seconds_by_category[Category.RECOMPUTED] == 0.5
    assert "3 steps kept, 0 recomputed" in to_text(report) and "\nrecomputed or cut off  0.500s" in to_text(report)


def test_notes_are_part_of_the_text() -> None:
    assert "Note: The job runs, or" in to_text(calculate(EVENTS[:3]))


def test_durations_are_readable() -> None:
    assert [seconds(s) for s in (None, 0.1341, 12.54, 200.4, 7500.0)] == ["-", "0.134s", "12.5s", "3m 20s", "2h 05m"]


def test_every_category_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "goodput" / "measures.md").read_text()
    missing = [category for category in Category if f"| `{category}` |" not in page]
    assert not missing
