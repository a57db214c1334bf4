"""`flyball explain DECISION`: what was decided, why, and what came of it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from flyball.cli.reach.options import (
    DatabaseOption,
    JobOption,
    StateDirOption,
    SupervisorOption,
    TokenFileOption,
    examples,
    look,
)
from flyball.cli.show.output import Format, OutputOption, moment, print_fields, print_json, print_table
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import UsageError

COMMAND: dict[str, Any] = {
    "help": "Explain a decision: reason, rule, evidence, the signals before it, and every command that followed.",
    "epilog": examples("flyball explain dec-17", "flyball explain dec-17 --job llama -o json"),
}


def command(
    *,
    decision: Annotated[str, typer.Argument(help="its id, as `flyball status` shows it, e.g. dec-17")],
    job: JobOption = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    database_url: DatabaseOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """One look; nothing is changed."""
    name = f"dec-{decision}" if decision.isdecimal() else decision
    if not re.fullmatch(r"dec-\d{1,18}", name):
        raise UsageError(
            f"{decision!r} is not a decision's id.", hint="`flyball status` shows the newest ones, e.g. dec-17"
        )
    with look(supervisor, token_file, state_dir, job=job, database_url=database_url) as client:
        found = client.get(f"/v1/decisions/{name}")
    if output is Format.JSON:
        print_json(found)
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    incident, action = found.get("incident") or {}, found.get("action") or {}
    print_fields(
        {
            "decision": found["decision_id"],
            "job": found.get("job"),
            "at": moment(found.get("at")),
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
        ("at", "source", "kind", "what was observed"),
        ([moment(s.get("at")), s.get("source"), s.get("kind"), _observed(s)] for s in found.get("signals") or ()),
    )
    commands = action.get("commands") or ()
    print_table(
        "Commands",
        ("command", "host", "state", "message"),
        ([c.get(k) for k in ("command_id", "host_id", "state", "message")] for c in commands),
    )


def _observed(signal: dict[str, Any]) -> dict[str, Any]:
    """What a signal says, without what the columns beside it say, and without what is not known."""
    said = {k: v for k, v in (signal.get("body") or {}).items() if k != "type" and v is not None}
    return said | {k: _phase(said[k]) for k in ("phase", "last_phase") if k in said}


def _phase(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:  # of a newer release
        return str(number)
