"""Goodput as the API gives it: calculated from the event log, at most once per moment and job."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import NotFound
from flyball.contracts.events import Event
from goodput.calculator import calculate
from goodput.report import to_json
from services.api.ports import EventLog, Json, ReadModels

FRESH_S = 2.0
PAGE = 5000
MAX_JOBS_KEPT = 16


class _Kept(msgspec.Struct):
    events: list[Event]
    after: int
    report: Json
    at_s: float


class GoodputReports:
    """Thread-safe. The newest jobs' events are kept, so that only what is new is read."""

    def __init__(self, *, events: EventLog, reads: ReadModels, clock: Clock) -> None:
        self._events = events
        self._reads = reads
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def report(self, job: str) -> Json:
        """The goodput report of a job up to now, or to its end. Raises NotFound."""
        ended_at = self._reads.job(job).get("ended_at") or None
        with self._lock:
            kept = self._kept.setdefault(job, _Kept(events=[], after=0, report={}, at_s=float("-inf")))
            self._kept.move_to_end(job)
            if len(self._kept) > MAX_JOBS_KEPT:
                self._kept.popitem(last=False)
            if self._clock.monotonic_s() - kept.at_s > FRESH_S:
                self._read_on(job, kept)
                if not kept.events:
                    raise NotFound(f"Job {job!r} has no events yet.", hint="ask again once it has started")
                kept.report = to_json(calculate(kept.events, now=ended_at or self._clock.wall_s(), job=job))
                kept.at_s = self._clock.monotonic_s()
            return kept.report

    def _read_on(self, job: str, kept: _Kept) -> None:
        while page := self._events.read(job, kept.after, PAGE):
            kept.events.extend(event for _, event in page)
            kept.after = page[-1][0]
