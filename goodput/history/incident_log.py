"""The incidents of one job, from the events that name them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flyball.contracts.events import Event
from goodput.history.facts import Incident
from goodput.history.values import text, whole


class IncidentLog:
    """Every incident that any event names; one whose opening is missing from the log opens where it is named first."""

    def __init__(self) -> None:
        self._first_named: dict[str, float] = {}
        self._opened: dict[str, Event] = {}
        self._closed: dict[str, Event] = {}

    def named(self, event: Event) -> None:
        """Take in that an event names an incident."""
        if event.incident_id:
            at = self._first_named.get(event.incident_id, math.inf)
            self._first_named[event.incident_id] = min(at, event.at)

    def opened(self, event: Event) -> None:
        """Take in an INCIDENT_OPENED event."""
        self.named(event)
        _keep_earliest(self._opened, event)

    def closed(self, event: Event) -> None:
        """Take in an INCIDENT_CLOSED event."""
        self.named(event)
        _keep_earliest(self._closed, event)

    def all(self) -> tuple[Incident, ...]:
        """By time of opening."""
        incidents = [self._incident(incident_id) for incident_id in self._first_named]
        return tuple(sorted(incidents, key=lambda i: (i.opened_at, i.incident_id)))

    def _incident(self, incident_id: str) -> Incident:
        opening, closing = self._opened.get(incident_id), self._closed.get(incident_id)
        told = [event for event in (closing, opening) if event]  # the end knows better than the beginning
        return Incident(
            incident_id=incident_id,
            cause=_first(text(e.data, "cause") for e in told) or "unknown",
            opened_at=opening.at if opening else self._first_named[incident_id],
            closed_at=closing.at if closing else None,
            outcome=text(closing.data, "state") if closing else "",
            lost_steps=whole(closing.data, "lost_steps") if closing else None,
            host_id=_first(e.host_id or text(e.data, "host_id") for e in told),
            failure_class=_first(text(e.data, "failure_class") for e in told),
            inferred=opening is not None and opening.data.get("inferred") is True,
        )


def _keep_earliest(chosen: dict[str, Event], event: Event) -> None:
    """The earliest event of each incident; ties are broken by content, so that order does not matter."""
    if not event.incident_id:
        return
    known = chosen.get(event.incident_id)
    if known is None or _identity(event) < _identity(known):
        chosen[event.incident_id] = event


def _identity(event: Event) -> tuple[float, str, str]:
    return event.at, repr(sorted(event.data.items(), key=lambda item: item[0])), event.host_id


def _first(values: Iterable[str]) -> str:
    return next((value for value in values if value), "")
