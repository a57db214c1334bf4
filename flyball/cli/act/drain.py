"""`flyball drain HOST`: move a host's ranks away without losing a step; `--cancel` gives it work again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.names import host_or_near
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.messages import announce_decision
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.contracts.clock import SleepingClock, SystemClock
from flyball.contracts.errors import Conflict, Unreachable, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.reports.drains import DrainRequest

COMMAND = command_help(
    "Move a host's ranks to a spare host without losing a step. All ranks of the job save the same step first. "
    "The drained host then gets no work until you cancel the drain. If no spare is free in time, the drain is refused "
    "and the job trains on undisturbed.",
    "flyball drain host-b --reason 'new fans'",
    "flyball drain host-b --cancel",
)

LOOK_INTERVAL_S = 0.2
MOVE_MARGIN_S = 180.0  # on top of --deadline: for the save, the move, and the first steps after it
CANCEL_TIMEOUT_S = 30.0
_CLOCK = SystemClock()


@with_supervisor()
def command(
    *,
    host: Annotated[str, typer.Argument(help="host id, as `flyball get hosts` shows it")],
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline",
            "--within",
            min=0.1,
            max=86_400.0,
            metavar="SECONDS",
            help="refuse if no spare is free by then",
        ),
    ] = 300.0,
    reason: Annotated[str, typer.Option(help="why you drain the host; stored and shown")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="cancel the drain: give the host work again")] = False,
    wait: Annotated[bool, typer.Option(help="wait until the host is drained; --no-wait only sends the request")] = True,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the host is drained (or released), 16 if the drain is refused, 10 if it takes too long."""
    name = check_name("The host", host)
    if cancel and reason:
        raise UsageError("--cancel takes no reason.", hint="flyball drain HOST --cancel")
    with choice.connect() as client, host_or_near(client, name):
        if cancel:
            found = client.post(f"/v1/hosts/{name}/undrain")
            found = _await_release(client, name) if wait else found
        else:
            known = {decision["decision_id"] for decision in client.items("/v1/decisions")} if wait else set()
            found = client.post(f"/v1/hosts/{name}/drain", DrainRequest(deadline, reason))
            found = await_drain(client, name, known, deadline) if wait else found
    if printed(found, output):
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


def await_drain(
    client: ApiClient,
    name: str,
    announced: set[str],
    within_s: float,
    *,
    clock: SleepingClock = _CLOCK,
) -> dict[str, Any]:
    """Wait until the host is drained, and return it. Announces new decisions meanwhile; `announced` has their ids.

    Raises Conflict if the drain is refused or cancelled, Unreachable if it takes too long.
    """
    until_s = clock.monotonic_s() + within_s + MOVE_MARGIN_S
    while True:
        found: dict[str, Any] = client.get(f"/v1/hosts/{name}")
        drain = found["drain"] or {"state": "cancelled"}
        _announce_decisions(client, name, announced)
        match drain["state"]:
            case "drained":
                return found
            case "refused":
                raise Conflict(drain["message"], hint="add a host (`flyball host`) and drain it again")
            case "cancelled":
                raise Conflict(f"Somebody cancelled the drain of {name}.", hint="drain it again if you still need to")
        if clock.monotonic_s() > until_s:
            raise Unreachable(
                f"{name} is not drained yet: {found['reason']}",
                hint="the drain goes on; watch it with `flyball status`",
            )
        clock.sleep(LOOK_INTERVAL_S)


def _announce_decisions(client: ApiClient, name: str, announced: set[str]) -> None:
    incidents = {i["incident_id"] for i in client.items("/v1/incidents") if i["host_id"] == name}
    for decision in client.items("/v1/decisions"):
        concerns_it = decision["incident_id"] in incidents or (decision.get("evidence") or {}).get("host") == name
        if concerns_it and decision["decision_id"] not in announced:
            announced.add(decision["decision_id"])
            announce_decision(decision)


def _await_release(client: ApiClient, name: str) -> dict[str, Any]:
    """Wait until the controller has released the host. Does not wait for a move that has begun; that is finished."""
    until_s = _CLOCK.monotonic_s() + CANCEL_TIMEOUT_S
    while True:
        found: dict[str, Any] = client.get(f"/v1/hosts/{name}")
        if found["drain"] is None:
            return found
        if _CLOCK.monotonic_s() > until_s:
            raise Unreachable(
                f"No controller released {name} within {CANCEL_TIMEOUT_S:.0f} s.",
                hint="a controller will once one runs; see /readyz of the supervisor",
            )
        _CLOCK.sleep(LOOK_INTERVAL_S)
