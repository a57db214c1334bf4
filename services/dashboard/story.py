"""One incident told in the order of time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flyball.contracts.decisions import IncidentState
from services.rules import incident_clock

Json = dict[str, Any]

AXIS = 1000.0  # width of the time axis
NARROWEST = 4.0  # of a phase on the axis
MAX_LOGS = 64  # ranks to choose from
# Parts of a signal's body that are text of several lines.
TEXTS = ("error", "log_tail", "kernel")
_HIDDEN = frozenset(("type", "job", "generation", *TEXTS))


def phases(incident: Mapping[str, Any], now: float) -> list[Json]:
    """Return the parts of an incident's time, each with its place on an axis of 0 to AXIS. What lasts still lasts until
    now."""
    changes = ((change["at"], IncidentState(change["state"])) for change in incident["timeline"])
    parts = incident_clock.parts(incident["fault_at"], changes, now)
    whole_s = sum(part.seconds for part in parts) or 1.0
    found: list[Json] = []
    x = 0.0
    for part in parts:
        width = NARROWEST + (AXIS - NARROWEST * len(parts)) * part.seconds / whole_s
        found.append({"name": part.name, "seconds": part.seconds, "x": x, "width": width})
        x += width
    return found


def told(incident: Mapping[str, Any]) -> list[Json]:
    """Return the lines of the story. A decision has its alternatives, a signal what was observed; signals of one kind
    that follow each other are one line. A message that was said before is not said again."""
    decisions = {decided["decision_id"]: decided for decided in incident["decided"]}
    signals = list(incident["observed"])
    lines: list[Json] = []
    said = [incident["message"]]
    for line in incident["story"]:
        if line["part"] == "alternative":
            continue
        shown = dict(line, offset_s=line["at"] - incident["fault_at"], decided=None, signals=[])
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
