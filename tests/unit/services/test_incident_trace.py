"""An incident becomes one trace, with the times of the records."""

from __future__ import annotations

from typing import Any

import pytest

from flyball.contracts.errors import ConfigurationError
from services.api.outgoing.traces import parse_headers
from services.record.incident_trace import TraceSpan, spans_of

T = 1_795_000_000.0


def story(**changes: object) -> dict[str, Any]:
    action = {
        "action_id": "act-2",
        "state": "succeeded",
        "attempt": 1,
        "message": "",
        "started_at": T + 1.0,
        "ended_at": T + 4.0,
        "phases": [
            {"at": T + 1.0, "phase": "quiesce", "state": "dispatched", "message": ""},
            {"at": T + 2.5, "phase": "verify", "state": "dispatched", "message": ""},
        ],
        "commands": [
            {
                "command_id": "act-2.stop.host-a.1", "host_id": "host-a", "kind": "stop_workers", "phase": "quiesce",
                "state": "succeeded", "code": "", "message": "", "created_at": T + 1.1, "answered_at": T + 2.0,
            },
            {
                "command_id": "act-2.stop.host-b.1", "host_id": "host-b", "kind": "stop_workers", "phase": "quiesce",
                "state": "queued", "code": "", "message": "", "created_at": T + 1.1, "answered_at": None,
            },
        ],
    }  # fmt: skip
    decision = {
        "decision_id": "dec-2", "kind": "restart_in_place", "rule": "restart_in_place", "reason": "Rank 0 was killed.",
        "at": T + 0.9, "generation": 1, "next_generation": 2, "action": action,
    }  # fmt: skip
    incident = {
        "incident_id": "inc-1", "job": "gpt", "host_id": "host-a", "cause": "worker_killed", "state": "resolved",
        "message": "Rank 0 was killed.", "opened_at": T + 0.5,
        "timeline": [{"at": T + 0.5, "state": "deciding"}, {"at": T + 4.2, "state": "resolved"}],
        "observed": [{"at": T, "stored_at": T + 0.2, "kind": "worker_exited", "source": "host-a"}],
        "decided": [decision, decision | {"decision_id": "dec-1", "kind": "hold", "action": None}],
    }  # fmt: skip
    return incident | changes


def tree(spans: tuple[TraceSpan, ...]) -> list[tuple[str, str, float, float]]:
    names = {span.span_id: span.name for span in spans} | {"": ""}
    return [(names[s.parent_id], s.name, round(s.start_at - T, 3), round(s.end_at - T, 3)) for s in spans]


def test_the_trace_has_signals_decisions_and_steps_below_the_incident() -> None:
    assert tree(spans_of("cluster-1", story())) == [
        ("", "incident worker_killed", 0.0, 4.2),
        ("incident worker_killed", "signal worker_exited", 0.0, 0.2),
        ("incident worker_killed", "decision restart_in_place", 0.9, 4.0),
        ("decision restart_in_place", "action", 1.0, 4.0),
        ("action", "step quiesce", 1.0, 2.5),
        ("action", "step verify", 2.5, 4.0),
        ("action", "command stop_workers", 1.1, 2.0),
        ("action", "command stop_workers", 1.1, 4.0),
        ("incident worker_killed", "decision hold", 0.9, 0.9),
    ]


def test_ids_are_those_of_the_incident_and_differ_between_clusters() -> None:
    once, again, elsewhere = (spans_of(cluster, story()) for cluster in ("a", "a", "b"))
    assert once == again
    assert len({span.span_id for span in once}) == len(once)
    assert {span.trace_id for span in once}.isdisjoint({span.trace_id for span in elsewhere})
    assert all(len(span.trace_id) == 32 and len(span.span_id) == 16 for span in once)


def test_what_failed_is_an_error_and_a_span_never_ends_before_it_begins() -> None:
    late = story(
        state="escalated", observed=[{"at": T + 9, "stored_at": T, "kind": "worker_exited", "source": "host-a"}]
    )
    late["decided"][0]["action"] |= {"state": "failed", "message": "No host starts it.", "ended_at": None}
    spans = spans_of("a", late)
    errors = {span.name: span.error for span in spans if span.error}
    assert errors == {
        "incident worker_killed": "Rank 0 was killed.",
        "decision restart_in_place": "No host starts it.",
        "action": "No host starts it.",
    }
    assert all(span.end_at >= span.start_at for span in spans)
    assert spans[0].end_at == T + 9


def test_headers_are_pairs() -> None:
    assert parse_headers("api-key=a%20b, x=1") == {"api-key": "a b", "x": "1"}
    assert parse_headers("") == {}
    with pytest.raises(ConfigurationError) as caught:
        parse_headers("secret")
    assert "secret" not in caught.value.message
