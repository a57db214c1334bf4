"""`flyball cordon`, `uncordon`, `silence`, `approve`, `adopt`: what operators order of the controller."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer

from flyball.cli.act import check
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.names import host_or_near
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.given_times import parse_duration
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.cli.show.times import clock
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Conflict, Unreachable, UsageError
from flyball.contracts.identity import check_name
from flyball.contracts.orders import AdoptRequest, ApproveRequest, CordonRequest, SilenceRequest

CORDON = command_help(
    "Give a host no work until it is uncordoned. Its ranks stay until their next restart; `flyball drain` moves them "
    "at once. Refused if too many hosts were cordoned within an hour.",
    "flyball cordon host-b --reason 'ECC errors'",
    "flyball cordon host-b --reason 'new switch' -o json",
)
UNCORDON = command_help(
    "Give a host work again, whatever it was cordoned for, once it has passed a check (`flyball check`). Its earlier "
    "failures no longer count.",
    "flyball uncordon host-b",
    "flyball uncordon host-b --skip-check -o json",
)
SILENCE = command_help(
    "Declare a maintenance window: nothing is decided because of this host, or of any host of a failure domain, until "
    "it is over. Jobs that need the host meanwhile wait for its end.",
    "flyball silence host-b --for 2h --reason 'new firmware'",
    "flyball silence --failure-domain rack-7 --for 30m --reason 'power work'",
    "flyball silence host-b --end",
)
APPROVE = command_help(
    "Approve the action that an incident waits for, where the job's policy asks for approval (`approve` in its file). "
    "Names the incident, or a decision about it.",
    "flyball approve inc-4",
    "flyball approve dec-17 --reason 'seen by the night shift' -o json",
)
ADOPT = command_help(
    "Supervise a job as its hosts run it, if nothing proves that this cluster started it, or one of its hosts says "
    "that it ended: `flyball get incidents` shows such jobs, and what each runs. Others are adopted without an order.",
    "flyball adopt llama-7b",
    "flyball adopt llama-7b --reason 'the database was lost' -o json",
)

LOOK_INTERVAL_S = 0.2
ANSWER_TIMEOUT_S = 30.0

HostArgument = Annotated[str, typer.Argument(help="host id, as `flyball get hosts` shows it")]
ReasonOption = Annotated[str, typer.Option(help="why; stored and shown")]


@with_supervisor()
def cordon(
    *,
    host: HostArgument,
    reason: Annotated[str, typer.Option(help="why; stored and shown")],
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the host is cordoned, 16 if the controller refuses it."""
    name = check_name("The host", host)
    with choice.connect() as client, host_or_near(client, name):
        client.post(f"/v1/hosts/{name}/cordon", CordonRequest(reason))
        _show_host(_await_host(client, name, is_cordoned=True), output)


@with_supervisor()
def uncordon(
    *,
    host: HostArgument,
    skip_check: Annotated[bool, typer.Option("--skip-check", help="give it work at once, without a check")] = False,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the host may have work, 16 if it does not pass its check."""
    name = check_name("The host", host)
    with choice.connect() as client, host_or_near(client, name):
        client.post(f"/v1/hosts/{name}/uncordon{'?skip_check=true' if skip_check else ''}")
        if refused := [] if skip_check else check.await_checks(client, [name]):
            raise Conflict(f"{refused[0]}.", hint="repair it, or give it work all the same: --skip-check")
        _show_host(_await_host(client, name, is_cordoned=False), output)


@with_supervisor()
def silence(
    *,
    host: Annotated[str, typer.Argument(help="host id, as `flyball get hosts` shows it")] = "",
    failure_domain: Annotated[str, typer.Option(help="all hosts of this failure domain, in place of one host")] = "",
    lasts: Annotated[str, typer.Option("--for", metavar="DURATION", help="how long: 90s, 30m, 2h, 1d")] = "",
    reason: ReasonOption = "",
    end: Annotated[bool, typer.Option("--end", help="end the window now")] = False,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the order is stored."""
    if bool(host) == bool(failure_domain):
        raise UsageError("Name a host, or a failure domain.", hint="flyball silence host-b --for 2h")
    if end == bool(lasts):
        raise UsageError("Say how long, or --end.", hint="flyball silence host-b --for 2h")
    for_s = 0.0 if end else parse_duration("--for", lasts)
    if not (end or for_s):
        raise UsageError("A window of no length silences nothing.", hint="--end ends one; --for 2h begins one")
    with choice.connect() as client:
        found = client.post("/v1/silence", SilenceRequest(for_s, host, failure_domain, reason))
    _show_order(found, output)


@with_supervisor()
def approve(
    *,
    target: Annotated[str, typer.Argument(metavar="INCIDENT|DECISION", help="inc-4, or dec-17")],
    reason: ReasonOption = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 16 if it waits for no approval."""
    if not re.fullmatch(r"(dec|inc)-\d{1,18}", target):
        raise UsageError(
            f"{target!r} is neither an incident nor a decision.",
            hint="`flyball get incidents` lists incidents, such as inc-4",
        )
    with choice.connect() as client:
        found = client.post("/v1/approve", ApproveRequest(target, reason))
    _show_order(found, output)


@with_supervisor()
def adopt(
    *,
    job: Annotated[str, typer.Argument(help="the job, as the incident names it")],
    reason: ReasonOption = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the order is stored."""
    name = check_name("The job", job)
    with choice.connect() as client:
        found = client.post(f"/v1/jobs/{name}/adopt", AdoptRequest(reason))
    _show_order(found, output)


def order_rows(orders: list[dict[str, Any]], now: float) -> list[list[object]]:
    """The rows of the orders that operators should see, for a table: kind, target, until, state, reason."""
    return [
        [o["kind"], o["target"], _until(o, now), o["state"], o["message"] or o["reason"] or o["awaited"]]
        for o in orders
        if o["kind"] != "clear"
    ]


def _until(order: dict[str, Any], now: float) -> str | None:
    return clock(order["until"], now) if order["until"] else None


def _await_host(client: ApiClient, name: str, *, is_cordoned: bool) -> dict[str, Any]:
    until_s = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        found: dict[str, Any] = client.get(f"/v1/hosts/{name}")
        if (found["state"] == "cordoned") is is_cordoned:
            return found
        for order in client.everything("/v1/orders") if is_cordoned else ():
            if (order["kind"], order["target"], order["state"]) == ("cordon", name, "refused"):
                raise Conflict(f"{order['message']}.", hint="uncordon another host first, or wait")
        if time.monotonic() > until_s:
            raise Unreachable(
                f"No controller carried the order out within {ANSWER_TIMEOUT_S:.0f} s; {name} is {found['state']}.",
                hint="it stands, and is carried out once a controller runs; see /readyz of the supervisor",
            )
        time.sleep(LOOK_INTERVAL_S)


def _show_host(found: dict[str, Any], output: Format) -> None:
    if not printed(found, output):
        print_fields({name: found[name] for name in ("host_id", "state", "ranks", "reason")})


def _show_order(order: dict[str, Any], output: Format) -> None:
    if printed(order, output):
        return
    now = SystemClock().wall_s()
    print_fields(
        {
            "order": order["kind"],
            "target": order["target"],
            "until": _until(order, now),
            "action": order["awaited"],
            "reason": order["reason"],
        }
    )
