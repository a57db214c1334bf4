"""Decisions and incidents as metrics, counted from the event log: the same on every process that serves them, and
growing on over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from flyball.contracts.clock import Clock
from flyball.contracts.events import Event, EventKind
from services.actuator.notify import AsyncWakeup
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics

PAGE = 500
LOOK_AGAIN_S = 1.0
COUNTED = (EventKind.DECISION, EventKind.INCIDENT_OPENED, EventKind.INCIDENT_CLOSED)

Read = Callable[[str | None, int, int, Collection[EventKind]], list[tuple[int, Event]]]


class EventMetrics:
    """Follows the event log from its beginning."""

    def __init__(self, read: Read, metrics: Metrics, clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._metrics = metrics
        self._after = 0
        self._opened_at: dict[str, float] = {}

    async def run(self, changed: AsyncWakeup) -> None:
        outage = Outage("event-metrics", self._clock)
        while True:
            wait_s = LOOK_AGAIN_S
            page: list[tuple[int, Event]] = []
            seen = changed.count
            try:
                page = await asyncio.to_thread(self._read, None, self._after, PAGE, COUNTED)
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            for position, event in page:
                self._after = position
                self._count(event)
            if len(page) < PAGE:
                await changed.wait(seen, wait_s)

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
