"""An incident as a trace: signals, decisions, and the steps of their actions, with the times of the records. Pure.

Ids are derived from the incident, so a trace that is sent twice is the same trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

Json = dict[str, Any]
Attribute = str | int | float | bool
_TRACE_BYTES, _SPAN_BYTES = 16, 8  # of OpenTelemetry's ids
_FAILED = frozenset({"failed", "timed_out", "refused", "escalated"})


class TraceSpan(msgspec.Struct, frozen=True):
    """One thing that took time. `parent_id` is '' for the incident itself."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_at: float
    end_at: float
    attributes: dict[str, Attribute] = {}
    error: str = ""  # why it failed; '': it did not


def spans_of(cluster: str, incident: Json) -> tuple[TraceSpan, ...]:
    """Return the trace of a closed incident, as `GET /v1/incidents/ID` shows it: the incident first, then its parts."""
    trace_id = _id(_TRACE_BYTES, cluster, incident["incident_id"])
    root_id = _id(_SPAN_BYTES, trace_id, "incident")
    parts = tuple(_parts(trace_id, root_id, incident))
    ends = [change["at"] for change in incident["timeline"]] + [part.end_at for part in parts]
    starts = [incident["opened_at"], *(part.start_at for part in parts)]
    root = TraceSpan(
        trace_id,
        root_id,
        "",
        f"incident {incident['cause']}",
        min(starts),
        max([*ends, *starts]),
        _attributes(incident, "incident_id", "job", "cause", "state", "host_id", "message"),
        incident["message"] if incident["state"] in _FAILED else "",
    )
    return root, *parts


def _parts(trace_id: str, root_id: str, incident: Json) -> Iterator[TraceSpan]:
    for number, signal in enumerate(incident["observed"]):
        yield TraceSpan(
            trace_id,
            _id(_SPAN_BYTES, trace_id, "signal", str(number)),
            root_id,
            f"signal {signal['kind']}",
            signal["at"],
            max(signal["at"], signal["stored_at"]),  # two machines' clocks
            _attributes(signal, "source"),
        )
    for decision in incident["decided"]:
        yield from _decision(trace_id, root_id, decision)


def _decision(trace_id: str, root_id: str, decision: Json) -> Iterator[TraceSpan]:
    span_id = _id(_SPAN_BYTES, trace_id, decision["decision_id"])
    steps = tuple(_action(trace_id, span_id, decision["action"])) if decision["action"] else ()
    yield TraceSpan(
        trace_id,
        span_id,
        root_id,
        f"decision {decision['kind']}",
        decision["at"],
        max([decision["at"], *(step.end_at for step in steps)]),
        _attributes(decision, "decision_id", "kind", "rule", "reason", "generation", "next_generation"),
        steps[0].error if steps else "",
    )
    yield from steps


def _action(trace_id: str, decision_span: str, action: Json) -> Iterator[TraceSpan]:
    span_id = _id(_SPAN_BYTES, trace_id, action["action_id"])
    phases = action["phases"]
    ended_at = action["ended_at"] or max([action["started_at"], *(change["at"] for change in phases)])
    error = action["message"] if action["state"] in _FAILED else ""
    named = _attributes(action, "action_id", "state", "attempt", "message")
    yield TraceSpan(trace_id, span_id, decision_span, "action", action["started_at"], ended_at, named, error)
    for number, (change, until) in enumerate(zip(phases, [*(one["at"] for one in phases[1:]), ended_at], strict=True)):
        phase_id = _id(_SPAN_BYTES, span_id, str(number))
        why = change["message"] if change["state"] in _FAILED else ""
        attributes = _attributes(change, "state", "message")
        end_at = max(change["at"], until)
        yield TraceSpan(trace_id, phase_id, span_id, f"step {change['phase']}", change["at"], end_at, attributes, why)
    for command in action["commands"]:
        yield TraceSpan(
            trace_id,
            _id(_SPAN_BYTES, trace_id, command["command_id"]),
            span_id,
            f"command {command['kind']}",
            command["created_at"],
            max(command["created_at"], command["answered_at"] or ended_at),
            _attributes(command, "command_id", "host_id", "phase", "state", "code", "message"),
            (command["message"] or command["code"]) if command["state"] in _FAILED else "",
        )


def _attributes(record: Json, *names: str) -> dict[str, Attribute]:
    return {f"flyball.{name}": record[name] for name in names if record[name] not in ("", None)}


def _id(size: int, *words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=size).hexdigest()
