"""`flyball check HOST...`: measure hosts in groups, and name the bad ones."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, announce, print_table, printed
from flyball.contracts.errors import Conflict, Unreachable
from flyball.contracts.identity import check_name
from flyball.contracts.orders import CheckRequest

COMMAND = command_help(
    "Check hosts that have no ranks: each multiplies matrices on every GPU (or on its CPU), then groups of hosts "
    "reduce a tensor together. Groups are changed until every host is known to be good or bad. A host that fails is "
    "cordoned.",
    "flyball check host-a host-b host-c",
    "flyball check host-b --reason 'new cable' -o json",
)

LOOK_INTERVAL_S = 0.2
TIMEOUT_S = 900.0  # five rounds of the longest default, and the answers


@with_supervisor()
def command(
    *,
    hosts: Annotated[list[str], typer.Argument(metavar="HOST...", help="host ids, as `flyball get hosts` shows them")],
    reason: Annotated[str, typer.Option(help="why; stored and shown")] = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 if all passed, 16 if one did not or cannot be checked."""
    names = list(dict.fromkeys(check_name("The host", host) for host in hosts))
    with choice.connect() as client:
        client.post("/v1/checks", CheckRequest(tuple(names), reason))
        refused = await_checks(client, names)
        found = [client.get(f"/v1/hosts/{name}") for name in names]
    if not printed(
        [{"host_id": host["host_id"], "state": host["state"], "check": host["check"]} for host in found], output
    ):
        columns = ["host", "state", "check", "devices", "matmul s", "all-reduce s", "message"]
        print_table("hosts", columns, map(_row, found))
    if refused:
        raise Conflict(f"{'; '.join(refused)}.", hint="`flyball status --hosts` shows the hosts")
    bad = [host["host_id"] for host in found if host["check"]["state"] not in ("passed", "slow")]
    if bad:
        raise Conflict(
            f"{', '.join(bad)} did not pass.",
            hint="repair it, then `flyball uncordon` checks it again; its processes wrote check/check.log in the state "
            "folder of its daemon",
        )


def await_checks(client: ApiClient, names: list[str]) -> list[str]:
    """Wait until the orders to check these hosts are carried out, and announce each round. Returns why some were
    refused. Raises Unreachable if it takes too long."""
    until_s = time.monotonic() + TIMEOUT_S
    said: dict[str, str] = {}
    while True:
        orders = [order for order in client.everything("/v1/orders", kind="check") if order["target"] in names]
        for action_id in _running(client, names):
            _announce(client, action_id, said)
        if all(order["state"] == "refused" for order in orders):
            return [order["message"] for order in orders]
        if time.monotonic() > until_s:
            raise Unreachable(
                f"The check of {', '.join(names)} has not ended within {TIMEOUT_S:.0f} s.",
                hint="it goes on once a controller runs; see /readyz of the supervisor, and `flyball status`",
            )
        time.sleep(LOOK_INTERVAL_S)


def _running(client: ApiClient, names: list[str]) -> list[str]:
    checks = (client.get(f"/v1/hosts/{name}")["check"] for name in names)
    return sorted({check["action_id"] for check in checks if check is not None and check["state"] == "running"})


def _announce(client: ApiClient, action_id: str, said: dict[str, str]) -> None:
    action = client.get(f"/v1/decisions/dec-{action_id.removeprefix('act-')}")["action"]
    message = action["message"] if action else ""
    if message and said.get(action_id) != message:
        said[action_id] = message
        announce(f"{action_id} {message}")


def _row(host: dict[str, Any]) -> list[object]:
    check = host["check"] or {}
    times = [f"{check[name]:.3f}" if check.get(name) else None for name in ("matmul_s", "all_reduce_s")]
    return [host["host_id"], host["state"], check.get("state"), check.get("devices"), *times, check.get("message")]
