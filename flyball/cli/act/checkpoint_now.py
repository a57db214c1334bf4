"""`flyball checkpoint now JOB`: let all ranks of a job save the same step now."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, printed
from flyball.cli.show.times import lasted
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.errors import Conflict, Unreachable
from flyball.contracts.orders import CheckpointRequest, OrderState

COMMAND = command_help(
    "Let all ranks of a running job save the same step now, and train on. The supervisor names a step a few steps "
    "ahead. Waits until the step is on the disk and persistent tiers, if the job uses any.",
    "flyball ckpt now llama --reason 'before the firmware'",
    "flyball checkpoint now llama --no-wait",
    "flyball ckpt now llama --within 1200 -o json",
)

CAUSE = "checkpoint_requested"
LOOK_INTERVAL_S = 0.2


@with_supervisor()
def command(
    *,
    job: Annotated[str, typer.Argument(help="name of the job")],
    reason: Annotated[str, typer.Option(help="why; stored and shown")] = "",
    wait: Annotated[bool, typer.Option(help="wait until it is saved; --no-wait only sends the request")] = True,
    within: Annotated[float, typer.Option("--within", min=0.1, metavar="SECONDS", help="wait this long")] = 600.0,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 0 once the step is saved, 16 if it is refused or cannot be saved, 10 if it takes too long."""
    with choice.connect(job) as client:
        get_job(client, job)
        order = client.post(f"/v1/jobs/{job}/checkpoint", CheckpointRequest(reason))
        incident = _await_end(client, job, float(order["requested_at"]), within) if wait else None
        step = _saved_step(client, incident) if incident else None
    if printed({"order": order, "incident": incident, "step": step}, output):
        return
    if incident is None:
        print_fields({"order": order["kind"], "job": job, "state": order["state"]})
        return
    took_s = incident["resolved_at"] - incident["opened_at"]
    print_fields({"job": job, "saved step": step, "took": lasted(took_s), "incident": incident["incident_id"]})


def _saved_step(client: ApiClient, incident: dict[str, Any]) -> int | None:
    """The step that was named for all ranks. None: another recovery saved or restored one meanwhile."""
    for name in reversed(incident["decision_ids"]):
        decision = client.get(f"/v1/decisions/{name}")
        if decision["kind"] == DecisionKind.EMERGENCY_CHECKPOINT:
            return int(decision["action"]["plan"]["emergency_step"])
    return None


def _await_end(client: ApiClient, job: str, requested_at: float, within_s: float) -> dict[str, Any]:
    """Wait until the step is saved, and return the incident. Announces its decisions meanwhile."""
    until_s = time.monotonic() + within_s
    announced: set[str] = set()
    while True:
        incident = next(iter(_incidents(client, job, requested_at)), None)
        if incident is None:
            _check_order(client, job)
        else:
            _announce(client, incident, announced)
            if incident["state"] == IncidentState.ESCALATED:
                raise Conflict(
                    f"The step was not saved: {incident['message']}", hint=f"flyball explain {incident['incident_id']}"
                )
            if incident["resolved_at"]:
                return incident
        if time.monotonic() > until_s:
            raise Unreachable(
                f"Job {job} has not saved within {within_s:.0f} s.", hint="it goes on; `flyball watch` shows its end"
            )
        time.sleep(LOOK_INTERVAL_S)


def _incidents(client: ApiClient, job: str, requested_at: float) -> list[dict[str, Any]]:
    """The incident that the request opened, or that was open already."""
    found = client.items("/v1/incidents", job=job, cause=CAUSE, limit=1)
    return [one for one in found if not one["resolved_at"] or one["resolved_at"] >= requested_at]


def _check_order(client: ApiClient, job: str) -> None:
    for order in client.items("/v1/orders", kind="checkpoint"):
        if order["target"] == job and order["state"] == OrderState.REFUSED:
            raise Conflict(order["message"], hint=f"`flyball status --job {job}` shows the job")


def _announce(client: ApiClient, incident: dict[str, Any], announced: set[str]) -> None:
    for name in incident["decision_ids"]:
        if name not in announced:
            announced.add(name)
            announce(f"{name} {client.get(f'/v1/decisions/{name}')['reason']}")
