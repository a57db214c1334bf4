"""Metrics of the event log: how many decisions there were, and how many incidents were opened and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.events import Event, EventKind
from services.runtime.outages import OUTAGES, Outage
from services.runtime.paging import EventLogReader, read_on

PAGE = 500
POLL_INTERVAL_S = 1.0
COUNTED = (EventKind.DECISION, EventKind.INCIDENT_OPENED, EventKind.INCIDENT_CLOSED)


class EventMetrics:
    """Counts from the beginning of the event log: every process that serves these metrics shows the same numbers, also
    after a restart, less what retention has removed by then.

    Alerts read them with `increase()`, which takes a number that goes down for a restart from 0, and misses the first
    value of a series. So they are served only once the log has been read to its end, and begin at 0; and alerts look
    away for a while from a number that went down.
    """

    def __init__(self, log: EventLogReader, registry: CollectorRegistry, clock: Clock, causes: Iterable[str]) -> None:
        """`causes`: all that an incident can have."""
        self._log = log
        self._registry = registry
        self._clock = clock
        self._after = 0
        self._is_served = False
        self._opened_at: dict[str, float] = {}
        self._decisions = Counter("flyball_decisions", "Decisions in the event log, by kind", ["kind"], registry=None)
        self._opened = Counter("flyball_incidents_opened", "Incidents opened, by cause", ["cause"], registry=None)
        self._closed = Counter("flyball_incidents_closed", "Incidents closed, by final state", ["state"], registry=None)
        self._open = Gauge("flyball_incidents_open", "Incidents open now", registry=None)
        self._seconds = Histogram(
            "flyball_incident_seconds",
            "Time from opening an incident to closing it",
            buckets=(0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
            registry=None,
        )
        for kind in DecisionKind:
            self._decisions.labels(kind=kind.value)
        for state in IncidentState:
            if state.closed:
                self._closed.labels(state=state.value)
        for cause in causes:
            self._opened.labels(cause=cause)

    async def run(self) -> None:
        """Follow the log until cancelled; scrapes lag by about a second at most."""
        outage = Outage("event-metrics", self._clock)
        while True:
            wait_s = POLL_INTERVAL_S
            try:
                more = await asyncio.to_thread(self.read_page)
                outage.ended()
                if more:
                    continue
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)

    def read_page(self) -> bool:
        """Count the next events. Returns whether there may be more now. May raise one of OUTAGES."""
        self._after, page = read_on(self._log, job=None, after=self._after, limit=PAGE, kinds=COUNTED)
        for _, event in page:
            self._count(event)
        self._open.set(len(self._opened_at))
        if len(page) == PAGE:
            return True
        if not self._is_served:
            for metric in (self._decisions, self._opened, self._closed, self._open, self._seconds):
                self._registry.register(metric)
            self._is_served = True
        return False

    def _count(self, event: Event) -> None:
        match event.kind:
            case EventKind.DECISION:
                self._decisions.labels(kind=str(event.data.get("kind", ""))).inc()
            case EventKind.INCIDENT_OPENED:
                self._opened.labels(cause=str(event.data.get("cause", ""))).inc()
                self._opened_at[event.incident_id] = event.at
            case EventKind.INCIDENT_CLOSED:
                self._closed.labels(state=str(event.data.get("state", ""))).inc()
                opened_at = self._opened_at.pop(event.incident_id, None)
                if opened_at is not None:
                    self._seconds.observe(max(0.0, event.at - opened_at))
            case _:
                return
