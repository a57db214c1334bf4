"""`flyball watch`: show incidents and decisions as they come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.event_stream import StreamedEvent, follow
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.output import Format, OutputOption, announce, cell, printable, record
from flyball.cli.show.times import exact_clock
from flyball.contracts.errors import FlyballError, NotFound, TooBusy, Unreachable
from flyball.contracts.events import EventKind

Json = dict[str, Any]
KINDS = (
    *(EventKind.JOB_SUBMITTED, EventKind.JOB_ENDED, EventKind.HOST_JOINED, EventKind.HOST_LEFT),
    *(EventKind.FAULT_INJECTED, EventKind.INCIDENT_OPENED, EventKind.INCIDENT_CLOSED),
    *(EventKind.DECISION, EventKind.ACTION_ENDED, EventKind.CONTROLLER_ELECTED),
)

COMMAND = command_help(
    "Watch what happens: incidents, decisions with their reasons, actions, and jobs and hosts that come and go, a line "
    "for each when it happens. Ends at Ctrl-C. Goes on by itself after a lost connection, and misses nothing.",
    "flyball watch",
    "flyball watch --job llama --last 0",
    "flyball watch -o json | jq -r .kind",
)


@with_supervisor()
def command(
    *,
    job: JobOption = "",
    last: Annotated[int, typer.Option("--last", min=0, max=1000, help="first show this many earlier events")] = 10,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> int:
    """Exit code 0 after Ctrl-C, which is the normal way to leave. With -o json: one event per line."""
    with choice.connect(job) as client:
        if job:
            get_job(client, job)
        try:
            for found in _events(client, job, last):
                sys.stdout.write(_shown(client, found, output))
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
    return 0


def _events(client: ApiClient, job: str, last: int) -> Iterator[StreamedEvent]:
    kinds = [kind.value for kind in KINDS]
    wanted: Json = {"newest": "true", "limit": max(last, 1), "job": job or None, "kind": kinds}
    page = client.get("/v1/events", **wanted)
    for item in page["items"] if last else ():
        yield StreamedEvent(item["position"], item["event"])
    yield from follow(client, after=page["next_after"], kinds=kinds, job=job, lost=_announce_loss)


def _announce_loss(error: FlyballError) -> None:
    announce(f"{error.message} Trying again until it answers.")


def _shown(client: ApiClient, found: StreamedEvent, output: Format) -> str:
    event = found.event
    reason = _reason(client, event)
    if output.is_for_programs:
        return record({"position": found.position, **event, "reason": reason}, output)
    return printable(f"{exact_clock(event['at'])}  {event.get('job') or '-':16} {text_of(event, reason)}") + "\n"


def _reason(client: ApiClient, event: Json) -> str:
    """Why, in a sentence: the event itself is short."""
    try:
        match event["kind"]:
            case EventKind.DECISION:
                return str(client.get(f"/v1/decisions/{event['data']['decision_id']}")["reason"])
            case EventKind.INCIDENT_OPENED:
                return str(client.get(f"/v1/incidents/{event['incident_id']}")["message"])
            case EventKind.JOB_ENDED:
                return str(client.get(f"/v1/jobs/{event['job']}")["message"])
    except (NotFound, Unreachable, TooBusy):  # removed since, or away: the stream itself waits for it
        pass
    return ""


def text_of(event: Json, reason: str) -> str:
    """One line about an event."""
    kind, data = event["kind"], event.get("data") or {}
    about = event.get("incident_id") or ""
    match kind:
        case EventKind.INCIDENT_OPENED:
            where = f" on {event['host_id']}" if event.get("host_id") else ""
            text = f"{about} opened, {data.get('cause')}{where}"
        case EventKind.INCIDENT_CLOSED:
            lost = data.get("lost_steps")
            text = f"{about} {data.get('state')}" + (f", {lost} steps lost" if lost not in (None, -1) else "")
        case EventKind.DECISION:
            text = f"{data.get('decision_id')} {data.get('kind')}" + (f" ({about})" if about else "")
        case EventKind.ACTION_ENDED:
            text = f"{data.get('action_id')} {data.get('state')}"
        case EventKind.FAULT_INJECTED:
            text = f"injected {data.get('fault')} into {data.get('target')}"
        case EventKind.HOST_JOINED | EventKind.HOST_LEFT:
            text = f"host {event.get('host_id')} {kind.removeprefix('host_')}"
        case _:
            text = f"{kind.replace('_', ' ')} {cell(data) if data else ''}".rstrip()
    return f"{text}: {reason}" if reason else text
