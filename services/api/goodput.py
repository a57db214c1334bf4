"""Goodput reports of the API, calculated from the event log and cached per job and query.

Threads, time per query and memory are bounded, so that goodput cannot starve the other routes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import NotFound, TooBusy
from flyball.contracts.events import Event
from goodput.account.options import AccountOptions
from services.api.ports import EventLog, Json, ReadModels

if TYPE_CHECKING:  # the calculator is imported at the first request: a supervisor starts faster without it
    from goodput.history.facts import History
    from goodput.history.job_history import HistoryBuilder

FRESH_S = 2.0  # a report is reused for this long, at least
FRESH_SHARE = 3.0  # and for this multiple of the time that it took
PAGE = 5000
MAX_AT_ONCE = 4  # requests, one of which calculates; each holds a thread of the pool that all routes share
RETRY_AFTER_S = 2.0
MAX_REPORTS_KEPT = 64  # one for each job and query
MAX_JOBS_KEPT = 16
MAX_VALUES_KEPT = 1_000_000  # steps and ranks in the events of all kept jobs, 100 to 350 bytes each


class ReportsBusy(TooBusy):
    """The limit of concurrent requests for goodput is reached."""

    status = 503


class Asked(msgspec.Struct, frozen=True):
    """The query of a report."""

    options: AccountOptions = AccountOptions()
    timeline_bins: int = 0  # number of time slices to return with it


class _Report(msgspec.Struct, frozen=True):
    content: Json
    fresh_until_s: float


class _ReadJob(msgspec.Struct):
    """The events of a job that have been read so far."""

    history: HistoryBuilder
    newest: int = 0
    n_values: int = 0


class GoodputReports:
    """Thread-safe; calculates one report at a time.

    Keeps the digested events of recently requested jobs, so that only new events are read. A job too large to keep is
    read from the beginning each time.
    """

    def __init__(self, *, events: EventLog, reads: ReadModels, clock: Clock) -> None:
        self._events = events
        self._reads = reads
        self._clock = clock
        self._places = threading.Semaphore(MAX_AT_ONCE)
        self._calculating = threading.Lock()
        self._logs: OrderedDict[str, _ReadJob] = OrderedDict()
        self._keeping = threading.Lock()  # held briefly: a request for a fresh report never waits for a calculation
        self._reports: OrderedDict[tuple[str, Asked], _Report] = OrderedDict()

    def report(self, job: str, asked: Asked | None = None) -> Json:
        """Return the goodput report of a job up to now, or to its end. Raises NotFound, UsageError, ReportsBusy."""
        asked = asked or Asked()
        ended_at = self._reads.job(job).get("ended_at") or None
        if fresh := self._fresh(job, asked):
            return fresh
        if not self._places.acquire(blocking=False):
            raise ReportsBusy(
                f"{MAX_AT_ONCE} requests for goodput are in progress, which is the limit.",
                retry_after_s=RETRY_AFTER_S,
                hint="try again in a few seconds",
            )
        try:
            with self._calculating:
                return self._fresh(job, asked) or self._calculated(job, asked, ended_at)
        finally:
            self._places.release()

    def _fresh(self, job: str, asked: Asked) -> Json | None:
        with self._keeping:
            known = self._reports.get((job, asked))
        return known.content if known and self._clock.monotonic_s() <= known.fresh_until_s else None

    def _calculated(self, job: str, asked: Asked, ended_at: float | None) -> Json:
        began_s = self._clock.monotonic_s()
        history = self._read(job).history(ended_at or self._clock.wall_s())
        self._drop_logs()
        content = _content(history, asked)
        done_s = self._clock.monotonic_s()
        with self._keeping:
            fresh_s = max(FRESH_S, FRESH_SHARE * (done_s - began_s))
            self._reports[job, asked] = _Report(content, done_s + fresh_s)
            self._reports.move_to_end((job, asked))
            if len(self._reports) > MAX_REPORTS_KEPT:
                self._reports.popitem(last=False)
        return content

    def _read(self, job: str) -> HistoryBuilder:
        from goodput.history.job_history import HistoryBuilder

        log = self._logs.setdefault(job, _ReadJob(HistoryBuilder(job)))
        self._logs.move_to_end(job)
        while page := self._events.read(job, log.newest, PAGE):
            log.history.add(event for _, event in page)
            log.newest = page[-1][0]
            log.n_values += sum(values_in(event) for _, event in page)
        if not log.n_values:
            raise NotFound(f"Job {job!r} has no events yet.", hint="try again once it has started")
        return log.history

    def _drop_logs(self) -> None:
        """Stay within the limits: drop the log just read if it alone exceeds them, else the least recently used."""
        newest = next(reversed(self._logs))
        if self._logs[newest].n_values > MAX_VALUES_KEPT:
            del self._logs[newest]
        kept = sum(log.n_values for log in self._logs.values())
        while len(self._logs) > MAX_JOBS_KEPT or kept > MAX_VALUES_KEPT:
            _, dropped = self._logs.popitem(last=False)
            kept -= dropped.n_values


def values_in(event: Event) -> int:
    """Return how many steps or ranks an event lists: a measure of the memory it needs."""
    lists = (event.data.get(name) for name in ("completed_at", "ranks"))
    return max([1, *(len(values) for values in lists if isinstance(values, list))])


def _content(history: History, asked: Asked) -> Json:
    from goodput.account.timeline_bins import binned
    from goodput.calculator import analysis_of
    from goodput.show.report import to_json

    analysis = analysis_of(history, asked.options)
    report = analysis.report
    if not asked.timeline_bins:
        return to_json(report)
    slices = binned(analysis.timeline.intervals, report.started_at, report.ended_at, asked.timeline_bins)
    return to_json(report) | {"timeline": msgspec.to_builtins(slices)}
