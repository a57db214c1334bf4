"""What torchrun's agent says on its stderr (LOGLEVEL=INFO), as events of Flyball's schema. Pure.

The agent polls its workers. When one has failed it first ends the others ("Sending process ... closing signal"), then
tells what failed ("failed (exitcode: ...)"), and then starts a new group ("Starting worker group"). The first of these
lines is when it noticed. It decides nothing beyond that, so detection ends and stopping begins at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from flyball.contracts.decisions import DecisionKind
from flyball.contracts.events import Event, EventKind

_STARTED = re.compile(r"\] Starting worker group$")
_CLOSING = re.compile(r"Sending process \d+ closing signal")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+")


class Line(NamedTuple):
    """A line of output, and when it was read (wall clock)."""

    at: float
    text: str


def agent_events(lines: Iterable[Line], job: str) -> list[Event]:
    """Generations, and an incident before each but the first, with the cause that the agent can know: a signal or an
    exit code of the worker that failed first."""
    events: list[Event] = []
    generation = -1
    incident_id = ""
    noticed_at: float | None = None

    def add(at: float, kind: EventKind, **data: str) -> None:
        events.append(Event(at=at, kind=kind, job=job, generation=generation, incident_id=incident_id, data=data))

    def open_incident(at: float, cause: str) -> str:
        name = f"restart-{generation + 1}"
        for kind, data in (
            (EventKind.INCIDENT_OPENED, {"cause": cause}),
            (EventKind.DECISION, {"kind": DecisionKind.RESTART_IN_PLACE.value}),
        ):
            events.append(Event(at=at, kind=kind, job=job, generation=generation, incident_id=name, data=data))
        return name

    for line in lines:
        if _STARTED.search(line.text):
            generation += 1
            add(line.at, EventKind.GENERATION_STARTED)
            incident_id, noticed_at = "", None
        elif _CLOSING.search(line.text):
            noticed_at = noticed_at or line.at
        elif match := _FAILED.search(line.text):
            cause = "worker_killed" if int(match[1]) < 0 else "worker_exception"
            incident_id = open_incident(noticed_at or line.at, cause)
            add(line.at, EventKind.WORKERS_STOPPED)
    if noticed_at is not None and not incident_id:
        open_incident(noticed_at, "unknown")
    return events
