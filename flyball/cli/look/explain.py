"""`flyball explain`: what the controller decided, why, and what followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from flyball.cli.look.stories import print_action, print_decision, print_incident
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, RawOption, printed, unescaped
from flyball.contracts.errors import UsageError

_KINDS: Mapping[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "dec": ("/v1/decisions", print_decision),
    "inc": ("/v1/incidents", print_incident),
    "act": ("/v1/actions", print_action),
}

COMMAND = command_help(
    "Explain a decision: its reason, rule and evidence, what else was weighed and its expected cost, the signals "
    "before it, and the commands it caused. An incident is explained by its story, an action by its phases.",
    "flyball explain dec-17",
    "flyball explain inc-4",
    "flyball explain dec-17 --job llama -o json",
)


@with_supervisor(without=())
def command(
    *,
    name: Annotated[
        str, typer.Argument(metavar="DECISION|INCIDENT|ACTION", help="its id: dec-17 (or 17), inc-4, act-17")
    ],
    job: JobOption = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
    raw: RawOption = False,
) -> None:
    """Read-only."""
    whole = f"dec-{name}" if name.isdecimal() else name
    if not re.fullmatch(r"(dec|inc|act)-\d{1,18}", whole):
        raise UsageError(
            f"{name!r} is not a decision's id, nor an incident's or an action's.",
            hint="`flyball get decisions` lists the newest ones, for example dec-17",
        )
    path, show = _KINDS[whole.partition("-")[0]]
    with choice.open_read_only(job) as client:
        found = client.get(f"{path}/{whole}")
    if not printed(found, output):
        with unescaped(raw):
            show(found)
