"""`flyball drain HOST`: have a host left without losing a step, and given back."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import StateDirOption, SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json, say
from flyball.contracts.errors import Conflict, Unreachable, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.reports.drains import DrainRequest

COMMAND: dict[str, Any] = {
    "help": "Have a host left: every rank of its job saves one step, the host's ranks go on at a spare, and it gets no "
    "new work until the drain is cancelled. Without a spare in time, it is refused, and the job is left alone.",
    "epilog": examples("flyball drain host-b --reason 'new fans'", "flyball drain host-b --cancel"),
}

LOOK_INTERVAL_S = 0.2
MOVE_MARGIN_S = 180.0  # beyond the time to begin: for the save, the move, and steps that advance again
CANCEL_TIMEOUT_S = 30.0


def command(
    *,
    host: Annotated[str, typer.Argument(help="its host id, as `flyball status` shows it")],
    within: Annotated[
        float, typer.Option(min=0.1, max=86_400.0, metavar="SECONDS", help="refuse it if no spare is free by then")
    ] = 300.0,
    reason: Annotated[str, typer.Option(help="for the record, and for who reads it")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="give the host work again")] = False,
    wait: Annotated[bool, typer.Option(help="wait until the host is left; --no-wait: only ask for it")] = True,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 when the host is left (or free again), 16 when that is refused, 10 when it takes too long."""
    name = check_name("The host", host)
    if cancel and reason:
        raise UsageError("--cancel takes no reason.", hint="flyball drain HOST --cancel")
    with connect(supervisor, token_file, state_dir) as client:
        if cancel:
            found = client.post(f"/v1/hosts/{name}/undrain")
            found = _await_release(client, name) if wait else found
        else:
            known = {decision["decision_id"] for decision in client.items("/v1/decisions")} if wait else set()
            found = client.post(f"/v1/hosts/{name}/drain", DrainRequest(within, reason))
            found = _await_drain(client, name, known, within) if wait else found
    if output is Format.JSON:
        print_json(found)
        return
    drain = found.get("drain") or {}
    print_fields(
        {
            "host": found["host_id"],
            "state": found["state"],
            "drain": drain.get("state"),
            "ranks": found["ranks"],
            "reason": drain.get("message") or found["reason"],
        }
    )


def _await_drain(client: ApiClient, name: str, said: set[str], within_s: float) -> dict[str, Any]:
    """The host when it is left. Decisions that were not `said` are told as they come. Raises Conflict when it is
    refused."""
    until_s = time.monotonic() + within_s + MOVE_MARGIN_S
    while True:
        found: dict[str, Any] = client.get(f"/v1/hosts/{name}")
        drain = found["drain"] or {"state": "cancelled"}
        _tell(client, name, said)
        match drain["state"]:
            case "drained":
                return found
            case "refused":
                raise Conflict(drain["message"], hint="add a host (`flyball host`) and drain it again")
            case "cancelled":
                raise Conflict(f"The drain of {name} was cancelled meanwhile.", hint="see who did, and drain it again")
        if time.monotonic() > until_s:
            raise Unreachable(
                f"{name} is not left yet: {found['reason']}", hint="the drain stands; see `flyball status`"
            )
        time.sleep(LOOK_INTERVAL_S)


def _tell(client: ApiClient, name: str, said: set[str]) -> None:
    incidents = {i["incident_id"] for i in client.items("/v1/incidents") if i["host_id"] == name}
    for decision in client.items("/v1/decisions"):
        about_it = decision["incident_id"] in incidents or (decision.get("evidence") or {}).get("host") == name
        if about_it and decision["decision_id"] not in said:
            said.add(decision["decision_id"])
            say(f"{decision['decision_id']} {decision['kind']}: {decision['reason']}")


def _await_release(client: ApiClient, name: str) -> dict[str, Any]:
    """The host when the controller has heard of it; a move that has begun is finished, and is not waited for."""
    until_s = time.monotonic() + CANCEL_TIMEOUT_S
    while True:
        found: dict[str, Any] = client.get(f"/v1/hosts/{name}")
        if found["drain"] is None:
            return found
        if time.monotonic() > until_s:
            raise Unreachable(
                f"No controller has released {name} within {CANCEL_TIMEOUT_S:.0f} s.",
                hint="it will when it is back; see /readyz of the supervisor",
            )
        time.sleep(LOOK_INTERVAL_S)
