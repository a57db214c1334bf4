"""Decisions and incidents as metrics, counted from the event log: the same on every process that serves them, and
growing on over restarts."""

from __future__ import annotations

import asyncio

from flyball.contracts.clock import Clock
from flyball.contracts.events import Event, EventKind
from services.runtime.metrics.log_cursor import EventLogReader, read_on
from services.runtime.metrics.outages import OUTAGES, Outage
from services.runtime.metrics.telemetry import Metrics

PAGE = 500
LOOK_AGAIN_S = 1.0
COUNTED = (EventKind.DECISION, EventKind.INCIDENT_OPENED, EventKind.INCIDENT_CLOSED)


class EventMetrics:
    """Follows the event log from its beginning."""

    def __init__(self, log: EventLogReader, metrics: Metrics, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._metrics = metrics
        self._after = 0
        self._opened_at: dict[str, float] = {}

    async def run(self) -> None:
        """Until cancelled; a scrape is never more than about a second behind."""
        outage = Outage("event-metrics", self._clock)
        while True:
            wait_s = LOOK_AGAIN_S
            try:
                self._after, page = await asyncio.to_thread(
                    read_on, self._log, job=None, after=self._after, limit=PAGE, kinds=COUNTED
                )
                outage.ended()
                for _, event in page:
                    self._count(event)
                if len(page) == PAGE:
                    continue
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)

    def _count(self, event: Event) -> None:
        metrics = self._metrics
        match event.kind:
            case EventKind.DECISION:
                metrics.decisions.labels(kind=str(event.data.get("kind", ""))).inc()
            case EventKind.INCIDENT_OPENED:
                metrics.incidents_opened.labels(cause=str(event.data.get("cause", ""))).inc()
                self._opened_at[event.incident_id] = event.at
            case EventKind.INCIDENT_CLOSED:
                metrics.incidents_closed.labels(state=str(event.data.get("state", ""))).inc()
                opened_at = self._opened_at.pop(event.incident_id, None)
                if opened_at is not None:
                    metrics.incident_seconds.observe(max(0.0, event.at - opened_at))
            case _:
                return
        metrics.incidents_open.set(len(self._opened_at))
