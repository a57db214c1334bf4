"""What the page of one incident tells, from the story that the API replies."""

from __future__ import annotations

from typing import Any

import pytest

from services.dashboard.story import AXIS, log_choices, phases, restored_from, told


def signal(at: float, kind: str = "worker_exited", source: str = "host-a", **body: object) -> dict[str, Any]:
    return {"at": at, "source": source, "kind": kind, "body": {"type": kind, "job": "demo", **body}}


BOOM = {"kind": "ValueError", "message": "boom", "traceback": ""}


def line(at: float, part: str, what: str, detail: str = "", about: str = "") -> dict[str, Any]:
    return {"at": at, "part": part, "what": what, "detail": detail, "about": about}


def incident(**parts: object) -> dict[str, Any]:
    states = [(100.0, "acting"), (101.0, "verifying"), (103.0, "resolved")]
    return {
        "incident_id": "inc-1",
        "host_id": "host-b",
        "opened_at": 100.0,
        "fault_at": 99.5,
        "message": "Rank 1 was killed.",
        "timeline": [{"at": at, "state": state} for at, state in states],
        "observed": [signal(99.5, rank=1)],
        "decided": [],
        "story": [],
    } | parts


def test_the_axis_has_each_state_from_the_fault_to_the_end() -> None:
    found = phases(incident(), now=500.0)
    assert [(one["name"], one["seconds"]) for one in found] == [
        ("undetected", 0.5),
        ("acting", 1.0),
        ("verifying", 2.0),
    ]
    assert found[0]["x"] == 0.0
    assert found[-1]["x"] + found[-1]["width"] == pytest.approx(AXIS)


def test_an_open_incident_lasts_until_now() -> None:
    still = incident(fault_at=70.0, timeline=[{"at": 100.0, "state": "open"}, {"at": 100.5, "state": "deciding"}])
    assert [(one["name"], one["seconds"]) for one in phases(still, now=110.0)] == [
        ("undetected", 30.0),
        ("deciding", 10.0),
    ]
    assert phases(still, now=0.0)[-1]["seconds"] == 0.5, "a clock that is behind shortens nothing"


def test_the_story_says_nothing_twice_and_keeps_evidence_where_it_belongs() -> None:
    decided = {"decision_id": "dec-2", "alternatives": [], "rule": "restart_in_place"}
    lines = told(
        incident(
            observed=[signal(99.5, rank=1, error=BOOM, exit_code=None), signal(100.2, rank=0), signal(100.3, rank=2)],
            decided=[decided],
            story=[
                line(99.5, "signal", "worker_exited"),
                line(100.0, "state", "acting", "Rank 1 was killed."),
                line(100.0, "decision", "restart_in_place", "Rank 1 was killed. It restarts.", "dec-2"),
                line(100.0, "alternative", "hold", "48 rank s", "dec-2"),
                line(100.1, "action", "stop: dispatched", "stopping", "act-2"),
                line(100.2, "signal", "worker_exited"),
                line(100.3, "signal", "worker_exited"),
                line(101.0, "state", "verifying", "Rank 1 was killed."),
            ],
        )
    )
    assert [one["part"] for one in lines] == ["signal", "state", "decision", "action", "signal", "state"]
    assert [one["detail"] for one in lines if one["part"] == "state"] == ["", ""]
    assert lines[2]["decided"] is decided
    assert lines[3]["offset_s"] == pytest.approx(0.6)
    assert lines[0]["signals"] == [{"source": "host-a", "facts": {"rank": "1"}, "texts": {"error": "ValueError: boom"}}]
    assert [one["facts"] for one in lines[4]["signals"]] == [{"rank": "0"}, {"rank": "2"}]


def test_the_ranks_that_signals_are_about_come_first_with_the_host_where_they_were() -> None:
    ranks = [{"rank": rank, "host_id": "host-new"} for rank in range(3)]
    observed = [signal(1.0, source="host-a", rank=0, expected=True), signal(0.0, source="host-b", rank=2)]
    assert log_choices(incident(observed=observed), ranks) == [
        {"rank": 2, "host_id": "host-b", "concerned": True},
        {"rank": 0, "host_id": "host-a", "concerned": True},
        {"rank": 1, "host_id": "host-new", "concerned": False},
    ]
    stalled = incident(observed=[signal(0.0, "rank_stalled", "sensor", ranks=[1])])
    assert log_choices(stalled, [])[0] == {"rank": 1, "host_id": "host-b", "concerned": True}


def test_where_the_ranks_restored_from() -> None:
    one = {"tier": "peer", "source_host": "host-b", "transport": "rdma"}
    own = {"tier": "memory", "source_host": "host-a", "transport": ""}
    assert restored_from([one, own, own]) == "peer of host-b, over RDMA (1 rank); memory of host-a (2 ranks)"
    assert restored_from([]) == ""


def test_an_error_is_its_traceback_unless_the_log_has_it() -> None:
    traceback = "Traceback:\n  train.py\nValueError: boom"
    raised = {**BOOM, "traceback": traceback}
    story = [line(99.5, "signal", "worker_exited")]
    [only] = told(incident(observed=[signal(99.5, error=raised)], story=story))[0]["signals"]
    assert only["texts"] == {"error": traceback}
    logged = signal(99.5, error=raised, log_tail=f"step 3\n{traceback}")
    [twice] = told(incident(observed=[logged], story=story))[0]["signals"]
    assert twice["texts"] == {"log_tail": f"step 3\n{traceback}"}
    other = signal(99.5, error={"kind": "KeyError", "message": "0", "traceback": ""}, log_tail="step 10 loss 2.0")
    [both] = told(incident(observed=[other], story=story))[0]["signals"]
    assert both["texts"] == {"error": "KeyError: 0", "log_tail": "step 10 loss 2.0"}
