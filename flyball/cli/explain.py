"""`flyball explain DECISION`: what the controller decided, why, and what followed."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json, print_table
from flyball.cli.show.times import exact_clock
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import UsageError

COMMAND = command_help(
    "Explain a decision: its reason, rule and evidence, the signals before it, and the commands it caused.",
    "flyball explain dec-17",
    "flyball explain dec-17 --job llama -o json",
)


@with_supervisor(without=())
def command(
    *,
    decision: Annotated[str, typer.Argument(help="the decision's id, as `flyball status` shows it: dec-17, or 17")],
    job: JobOption = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    name = f"dec-{decision}" if decision.isdecimal() else decision
    if not re.fullmatch(r"dec-\d{1,18}", name):
        raise UsageError(
            f"{decision!r} is not a decision's id.", hint="`flyball status` shows the newest ones, for example dec-17"
        )
    with choice.open_read_only(job) as client:
        found = client.get(f"/v1/decisions/{name}")
    if output is Format.JSON:
        print_json(found)
        return
    _print(found)


def _print(found: dict[str, Any]) -> None:
    incident, action = found.get("incident") or {}, found.get("action") or {}
    print_fields(
        {
            "decision": found["decision_id"],
            "job": found.get("job"),
            "at": exact_clock(found.get("at")),
            "kind": found.get("kind"),
            "reason": found.get("reason"),
            "rule": found.get("rule"),
            "evidence": found.get("evidence"),
            "incident": incident.get("incident_id"),
            "cause": incident.get("cause"),
            "incident state": incident.get("state"),
            "lost steps": None if incident.get("lost_steps") in (None, -1) else incident["lost_steps"],
            "action": action.get("action_id"),
            "action state": action.get("state"),
        }
    )
    print_table(
        "Signals before it",
        ("at", "source", "kind", "details"),
        ([exact_clock(s.get("at")), s.get("source"), s.get("kind"), _details(s)] for s in found.get("signals") or ()),
    )
    commands = action.get("commands") or ()
    print_table(
        "Commands",
        ("command", "host", "state", "message"),
        ([c.get(k) for k in ("command_id", "host_id", "state", "message")] for c in commands),
    )


def _details(signal: dict[str, Any]) -> dict[str, Any]:
    """A signal's known fields, without its type, which has its own column."""
    body = {k: v for k, v in (signal.get("body") or {}).items() if k != "type" and v is not None}
    return body | {k: _phase_name(body[k]) for k in ("phase", "last_phase") if k in body}


def _phase_name(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:  # from a newer release
        return str(number)
