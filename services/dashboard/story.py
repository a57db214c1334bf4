"""One incident told in the order of time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Json = dict[str, Any]

AXIS = 1000.0  # width of the time axis
NARROWEST = 4.0  # of a phase on the axis
MAX_LOGS = 64  # ranks to choose from
# What each state of an incident is for, as a phase of its time axis.
PHASES = {"open": "deciding", "deciding": "deciding", "acting": "acting", "verifying": "verifying"}
# Parts of a signal's body that are text of several lines.
TEXTS = ("error", "log_tail", "kernel")
_HIDDEN = frozenset(("type", "job", "generation", *TEXTS))


def phases(incident: Mapping[str, Any], now: float) -> list[Json]:
    """Return the parts of an incident's time: from the observation to the incident, then by state until its end, or
    until now. Each has its place on an axis of 0 to AXIS."""
    changes = [(change["at"], PHASES.get(change["state"], "")) for change in incident["timeline"]]
    observed_at = _fault_at(incident)
    if observed_at < incident["opened_at"]:
        changes.insert(0, (observed_at, "detecting"))
    if changes and changes[-1][1]:
        changes.append((max(now, changes[-1][0]), ""))
    found: list[Json] = []
    for (began_at, name), (ended_at, _) in pairwise(changes):
        if name and found and found[-1]["name"] == name:
            found[-1]["ended_at"] = ended_at
        elif name:
            found.append({"name": name, "began_at": began_at, "ended_at": ended_at})
    whole_s = sum(phase["ended_at"] - phase["began_at"] for phase in found) or 1.0
    x = 0.0
    for phase in found:
        phase["seconds"] = phase["ended_at"] - phase["began_at"]
        phase["x"] = x
        phase["width"] = NARROWEST + (AXIS - NARROWEST * len(found)) * phase["seconds"] / whole_s
        x += phase["width"]
    return found


def _fault_at(incident: Mapping[str, Any]) -> float:
    """Return when it began: what stands still or is silent was so before somebody noticed."""
    observed_at = float(incident["observed_at"] or incident["opened_at"])
    for signal in incident["observed"][:1]:
        return min(observed_at, float(signal["at"]) - float(signal["body"].get("silent_s") or 0.0))
    return observed_at


def told(incident: Mapping[str, Any]) -> list[Json]:
    """Return the lines of the story. A decision has its alternatives, a signal what was observed; signals of one kind
    that follow each other are one line. A message that was said before is not said again."""
    decisions = {decided["decision_id"]: decided for decided in incident["decided"]}
    signals = list(incident["observed"])
    began_at = min((line["at"] for line in incident["story"]), default=incident["opened_at"])
    lines: list[Json] = []
    said = [incident["message"]]
    for line in incident["story"]:
        if line["part"] == "alternative":
            continue
        shown = dict(line, offset_s=line["at"] - began_at, decided=None, signals=[])
        if line["part"] == "signal":
            signal = _taken(signals, line)
            last = lines[-1] if lines else None
            if last and last["part"] == "signal" and last["what"] == line["what"]:
                last["signals"].append(signal)
                continue
            shown["signals"] = [signal]
        elif line["part"] == "decision":
            shown["decided"] = decisions.get(line["about"])
            said.append(line["detail"])
        elif any(message.startswith(line["detail"]) for message in said):
            shown["detail"] = ""
        else:
            said.append(line["detail"])
        lines.append(shown)
    return lines


def _taken(signals: list[Json], line: Mapping[str, Any]) -> Json:
    """Remove and return the signal that a line is about."""
    for i, signal in enumerate(signals):
        if signal["at"] == line["at"] and signal["kind"] == line["what"]:
            return _signal(signals.pop(i))
    return {"source": "", "facts": {}, "texts": {}}


def _signal(signal: Mapping[str, Any]) -> Json:
    body = signal["body"]
    facts = {name: _text(value) for name, value in body.items() if name not in _HIDDEN and _says_something(value)}
    texts = {name: _lines(body[name]) for name in TEXTS if body.get(name)}
    if "error" in texts and texts["error"].strip() in texts.get("log_tail", ""):
        del texts["error"]  # the log has all of it, with what led to it
    return {"source": signal["source"], "facts": facts, "texts": texts}


def _lines(value: str | Mapping[str, str]) -> str:
    """A text as it is, and of an error its traceback, or its kind and message."""
    if isinstance(value, str):
        return value
    return value.get("traceback") or ": ".join(filter(None, (value.get("kind"), value.get("message"))))


def _says_something(value: object) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def restored_from(restored: Sequence[Mapping[str, Any]]) -> str:
    """Return "memory of host-a (1 rank); peer of host-b, over RDMA (2 ranks)"."""
    counts: dict[str, int] = {}
    for one in restored:
        over = f", over {one['transport'].upper()}" if one["transport"] else ""
        source = f"{one['tier']}{' of ' + one['source_host'] if one['source_host'] else ''}{over}"
        counts[source] = counts.get(source, 0) + 1
    return "; ".join(f"{source} ({count} rank{'' if count == 1 else 's'})" for source, count in counts.items())


def log_choices(incident: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the ranks whose logs belong to an incident: first those that a signal is about, with the host where they
    were then, then the others of the job with the host where they are now."""
    hosts: dict[int, str] = {}
    for signal in sorted(incident["observed"], key=lambda one: bool(one["body"].get("expected"))):
        body = signal["body"]
        for rank in [body["rank"]] if "rank" in body else body.get("ranks") or ():
            hosts.setdefault(rank, signal["source"] if "rank" in body else incident["host_id"])
    concerned = set(hosts)
    for rank in ranks:
        hosts.setdefault(rank["rank"], rank["host_id"])
    return [
        {"rank": rank, "host_id": host_id, "concerned": rank in concerned}
        for rank, host_id in list(hosts.items())[:MAX_LOGS]
    ]
