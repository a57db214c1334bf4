"""Goodput reports of the API, from an account of each job that goes on with the events that are new.

Threads, time per query and memory are bounded, so that goodput cannot starve the other routes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, NotFound, TooBusy, UsageError
from goodput.account.options import AccountOptions
from services.api.ports import EventLog, GoodputAccounts, Json, ReadModels
from services.runtime.list_filters import JobFilter
from services.runtime.outages import OUTAGES, Outage
from services.runtime.paging import Page

if TYPE_CHECKING:  # the calculator is imported at the first request: a supervisor starts faster without it
    from goodput.account.job_account import JobAccount
    from goodput.history.facts import History

_log = structlog.get_logger(__name__)

FRESH_S = 2.0  # a report is reused for this long, at least
FRESH_SHARE = 3.0  # and for this multiple of the time that it took
PAGE = 50  # events, each of up to 10 minutes of steps
PATIENCE_S = 10.0  # within which a request reads on; then the client is told to come back
MAX_AT_ONCE = 4  # requests, one of which calculates; each holds a thread of the pool that all routes share
RETRY_AFTER_S = 2.0
MAX_REPORTS_KEPT = 64  # one for each job and query
MAX_ACCOUNTS_KEPT = 16
EVENTS_UNSAVED = 2000  # an account is stored once it is so far ahead of what is stored
RATIO_INTERVAL_S = 30.0  # between two calculations of the ratios that metrics show, at least
RATIO_SHARE = 20.0  # and this multiple of the time that they took
MAX_JOBS = 50  # those submitted last


class ReportsBusy(TooBusy):
    """The limit of concurrent requests for goodput is reached, or a job's events are still being read."""

    status = 503


class Asked(msgspec.Struct, frozen=True):
    """The query of a report."""

    options: AccountOptions = AccountOptions()
    all_runs: bool = False  # also of earlier runs that the newest one resumed
    timeline_bins: int = 0  # number of time slices to return with it


class _Report(msgspec.Struct, frozen=True):
    content: Json
    fresh_until_s: float


class _Kept(msgspec.Struct):
    account: JobAccount
    saved: int  # the position up to which it is stored


class GoodputReports:
    """Thread-safe; calculates one report at a time."""

    def __init__(
        self,
        *,
        events: EventLog,
        reads: ReadModels,
        accounts: GoodputAccounts,
        clock: Clock,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._events = events
        self._reads = reads
        self._stored = accounts
        self._clock = clock
        self._patience_s = patience_s
        self._places = threading.Semaphore(MAX_AT_ONCE)
        self._calculating = threading.Lock()
        self._accounts: OrderedDict[str, _Kept] = OrderedDict()
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

    def run(self, stop: threading.Event) -> None:
        """Keep the accounts of open jobs up to date, and store their ratios, until stopped."""
        outage = Outage("goodput", self._clock)
        wait_s = RATIO_INTERVAL_S
        while not stop.wait(wait_s):
            try:
                began_s = self._clock.monotonic_s()
                for job in self._reads.jobs(Page(MAX_JOBS), open_only=True, wanted=JobFilter()):
                    self._update_or_log(str(job["job"]), stop)
                wait_s = max(RATIO_INTERVAL_S, RATIO_SHARE * (self._clock.monotonic_s() - began_s))
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
        with contextlib.suppress(*OUTAGES):
            self.store()

    def _update_or_log(self, job: str, stop: threading.Event) -> None:
        """Bring a job's account up to date. One that cannot be keeps no other waiting."""
        try:
            self._update(job, stop)
        except OUTAGES:
            raise
        except (FlyballError, ValueError, ArithmeticError) as error:
            _log.warning("goodput_not_calculated", job=job, error=str(error))

    def store(self) -> None:
        """Store the accounts that are kept, as far as they are."""
        with self._calculating:
            for kept in self._accounts.values():
                self._save(kept)

    def _update(self, job: str, stop: threading.Event) -> None:
        """Bring a job's account up to date, and pause after each page for as long as it took."""
        more = True
        while more and not stop.is_set():
            began_s = self._clock.monotonic_s()
            with self._calculating:
                kept = self._kept(job)
                more = self._read_page(kept)
                if not more and kept.account.position:
                    ratio = _analysed(kept.account.history(self._clock.wall_s()), Asked())["goodput"]
                    if ratio is not None:
                        self._stored.save_ratio(job, ratio)
            stop.wait(self._clock.monotonic_s() - began_s)

    def _fresh(self, job: str, asked: Asked) -> Json | None:
        with self._keeping:
            known = self._reports.get((job, asked))
        return known.content if known and self._clock.monotonic_s() <= known.fresh_until_s else None

    def _calculated(self, job: str, asked: Asked, ended_at: float | None) -> Json:
        began_s = self._clock.monotonic_s()
        kept = self._kept(job)
        while self._read_page(kept):
            if self._clock.monotonic_s() - began_s > self._patience_s:
                read = f"{kept.account.position} of {self._events.last()}"
                raise ReportsBusy(
                    f"The events of job {job!r} are still being read: {read}.",
                    retry_after_s=RETRY_AFTER_S,
                    hint="try again; it goes on from there",
                )
        if not kept.account.position:
            raise NotFound(f"Job {job!r} has no events yet.", hint="try again once it has started")
        content = _analysed(kept.account.history(ended_at or self._clock.wall_s()), asked)
        done_s = self._clock.monotonic_s()
        with self._keeping:
            fresh_s = max(FRESH_S, FRESH_SHARE * (done_s - began_s))
            self._reports[job, asked] = _Report(content, done_s + fresh_s)
            self._reports.move_to_end((job, asked))
            if len(self._reports) > MAX_REPORTS_KEPT:
                self._reports.popitem(last=False)
        return content

    def _kept(self, job: str) -> _Kept:
        """Return the job's account, from memory, else as it is stored, else a new one."""
        from goodput.account.job_account import VERSION, JobAccount

        kept = self._accounts.pop(job, None)
        if kept is None or kept.account.position > self._events.last():  # the database was set back
            document = self._stored.load(job, VERSION)
            account = None if document is None else JobAccount.decoded(document)
            kept = _Kept(account or JobAccount.of(job), account.position if account else 0)
        self._accounts[job] = kept
        if len(self._accounts) > MAX_ACCOUNTS_KEPT:
            self._save(self._accounts.popitem(last=False)[1])
        return kept

    def _read_page(self, kept: _Kept) -> bool:
        """Add the next events to an account. Returns whether there may be more now."""
        from goodput.history.job_history import OF_EVERY_JOB

        account = kept.account
        page = self._events.history(account.job, account.position, PAGE, OF_EVERY_JOB)
        account.add(page)
        if account.position - kept.saved >= EVENTS_UNSAVED:
            self._save(kept)
        return len(page) == PAGE

    def _save(self, kept: _Kept) -> None:
        from goodput.account.job_account import VERSION

        if kept.account.position > kept.saved:
            self._stored.save(kept.account.job, VERSION, kept.account.position, kept.account.encoded())
            kept.saved = kept.account.position


def _analysed(history: History, asked: Asked) -> Json:
    from goodput.account.timeline_bins import binned
    from goodput.calculator import analysis_of
    from goodput.show.report import to_json

    options = asked.options
    if history.submissions and not asked.all_runs:
        from_at = max(options.from_at or 0.0, history.submissions[-1])
        if options.to_at is not None and options.to_at <= from_at:
            raise UsageError("The newest run began later.", hint="ask for all runs")
        options = msgspec.structs.replace(options, from_at=from_at)
    analysis = analysis_of(history, options)
    report = analysis.report
    if not asked.timeline_bins:
        return to_json(report)
    slices = binned(analysis.timeline.intervals, report.started_at, report.ended_at, asked.timeline_bins)
    return to_json(report) | {"timeline": msgspec.to_builtins(slices)}
