"""Tells what happened, for people: one decision, one incident, one action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flyball.cli.look.jobs_table import known
from flyball.cli.show.output import print_fields, print_table, printable
from flyball.cli.show.times import exact_clock, exact_utc, lasted
from flyball.contracts.cluster import Phase

Json = dict[str, Any]
STACKS_PRINTED = 4  # -o json has all


def print_incident(found: Json) -> None:
    """An incident, and its story in the order of time."""
    began, ended = found["fault_at"], found["resolved_at"]
    print_fields(
        {
            **{"incident": found["incident_id"], "job": found["job"], "host": found["host_id"]},
            **{"cause": found["cause"], "state": found["state"], "message": found["message"]},
            **{"fault": exact_clock(began), "resolved": exact_clock(ended)},
            **{"took": lasted(ended - began if ended else None), "of it": _durations(found)},
            **{"waits for": found["holding_for"]},
            **{"failed step": known(found["failed_step"]), "restored step": known(found["restored_step"])},
            **{"lost steps": known(found["lost_steps"]), "signals": found["signals"]},
            **{"decisions": found["decision_ids"]},
        }
    )
    columns = ("at (UTC)", "", "what", "detail", "about")
    rows = [[exact_utc(line["at"]), *(line[n] for n in ("part", "what", "detail", "about"))] for line in found["story"]]
    print_table("Story", columns, rows)
    for signal in found["observed"]:
        _print_log(signal["body"])


def _durations(found: Json) -> str:
    return ", ".join(f"{name} {lasted(seconds)}" for name, seconds in found["durations_s"].items())


def print_action(found: Json) -> None:
    """An action, its phases and its commands."""
    print_fields(
        {
            **{"action": found["action_id"], "decision": found["decision_id"], "incident": found["incident_id"]},
            **{"job": found["job"], "kind": found["kind"], "state": found["state"], "phase": found["phase"]},
            **{"attempt": found["attempt"], "message": found["message"]},
            **{"started": exact_clock(found["started_at"]), "ended": exact_clock(found["ended_at"])},
        }
    )
    rows = [[exact_utc(p["at"]), p["phase"], p["state"], p["message"]] for p in found["phases"]]
    print_table("Phases", ("at (UTC)", "phase", "state", "message"), rows)
    _print_commands(found["commands"])


def print_signal(found: Json) -> None:
    """A signal, and what it says."""
    print_fields(
        {
            **{"signal": found["signal_id"], "kind": found["kind"], "observed": exact_clock(found["at"])},
            **{"stored": exact_clock(found["stored_at"]), "by": found["source"], "host": found["host_id"]},
            **{"job": found["job"], "generation": known(found["generation"])},
            **{name: value for name, value in _details(found).items() if name not in ("job", "generation")},
        }
    )
    _print_log(found["body"])


def print_decision(found: Json) -> None:
    """A decision: its reason and evidence, what else was weighed, the signals before it and the commands after."""
    incident, action = found.get("incident") or {}, found.get("action") or {}
    print_fields(
        {
            "decision": found["decision_id"],
            "job": found.get("job"),
            "at": exact_clock(found.get("at")),
            "kind": found.get("kind"),
            "reason": found.get("reason"),
            "rule": found.get("rule"),
            "evidence": {n: v for n, v in (found.get("evidence") or {}).items() if v not in (None, "")},
            "incident": incident.get("incident_id"),
            "cause": incident.get("cause"),
            "incident state": incident.get("state"),
            "lost steps": None if incident.get("lost_steps") in (None, -1) else incident["lost_steps"],
            "action": action.get("action_id"),
            "action state": action.get("state"),
        }
    )
    print_table(
        "Weighed, by expected loss (rank seconds)",
        ("course", "loss", "", "why"),
        (
            [a.get("kind"), f"{a.get('expected_cost_gpu_s', 0.0):.1f}", _standing(a), a.get("reason")]
            for a in found.get("alternatives") or ()
        ),
    )
    print_table(
        "Signals before it",
        ("at (UTC)", "source", "kind", "details"),
        ([exact_utc(s.get("at")), s.get("source"), s.get("kind"), _details(s)] for s in found.get("signals") or ()),
    )
    for signal in found.get("signals") or ():
        _print_log(signal.get("body") or {})
    _print_stands(found)
    _print_commands(action.get("commands") or ())


def _print_commands(commands: Sequence[Json]) -> None:
    print_table(
        "Commands",
        ("command", "host", "state", "message"),
        ([c.get(k) for k in ("command_id", "host_id", "state", "message")] for c in commands),
    )


def _print_log(body: Json) -> None:
    """The last lines that a worker printed before it ended."""
    if body.get("log_tail"):
        print(f"Last lines of rank {body.get('rank')}, {printable(body.get('error_class') or 'not classified')}:")
        print("".join(f"  {printable(line)}\n" for line in str(body["log_tail"]).split("\n")))


def _standing(alternative: Json) -> str:
    if alternative.get("is_chosen"):
        return "chosen"
    return "possible" if alternative.get("is_feasible") else "not possible"


def _print_stands(found: Json) -> None:
    """Where each rank stood, and the stacks of those that are to blame."""
    stands = found.get("stands") or ()
    fields = ("rank", "host_id", "kind", "call", "place", "caller", "process", "note")
    print_table(
        "Where the ranks stood",
        ("rank", "host", "in", "call", "at", "called from", "process", "note"),
        ([stand.get(field) for field in fields] for stand in stands),
    )
    culprits = _culprits(found)
    shown = [stand for stand in stands if stand.get("rank") in culprits] or stands
    for stand in [stand for stand in shown if stand.get("stack")][:STACKS_PRINTED]:
        print(f"Stack of rank {stand.get('rank')}, innermost call first:")
        print("".join(f"  {printable(line)}\n" for line in str(stand["stack"]).split("\n")))


def _culprits(found: Json) -> set[int]:
    """The ranks that the decision's evidence names; ranges are written 0-7."""
    named = str((found.get("evidence") or {}).get("culprits") or "")
    parts = [part.partition("-") for part in named.split(",") if re.fullmatch(r"\d+(-\d+)?", part)]
    return {rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)}


def _details(signal: Json) -> Json:
    """A signal's known fields, without its type, which has its own column, and without the log, which follows."""
    apart = ("type", "log_tail")
    body = {k: v for k, v in (signal.get("body") or {}).items() if k not in apart and v not in (None, "")}
    return body | {k: _phase_name(body[k]) for k in ("phase", "last_phase") if k in body}


def _phase_name(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:  # from a newer release
        return str(number)
