"""Puts an event log's information on one job in order.

Logs are incomplete, unordered and repetitive. So every value is a minimum, a maximum or a union over events, and
neither order nor repetition matters. Fields that are missing, of the wrong type or absurd are ignored. Events are added
one by one and not kept, so a log of a million events needs little memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.events import Event, EventKind, per_rank
from goodput.history.facts import History
from goodput.history.job_log import JobLog
from goodput.history.step_log import SettledStep
from goodput.history.values import CLOCK_SET_S, LATEST_S

# Events of these kinds without a job concern every job.
OF_EVERY_JOB = frozenset({EventKind.FAULT_INJECTED, EventKind.CONTROLLER_ELECTED, EventKind.SIGNAL})
_RANK_MARKS = (EventKind.RANK_MARKS, EventKind.RESTORED)  # may cover several ranks


class JobEvents(msgspec.Struct):
    """The events of one job. Those of an unset clock are kept apart: they are useless beside others, while a log
    with only such events counts from its own zero."""

    _log: JobLog = msgspec.field(default_factory=JobLog)
    _unset: JobLog = msgspec.field(default_factory=JobLog)
    _absurd_times: bool = False

    def add(self, event: Event) -> None:
        for one in per_rank(event) if event.kind in _RANK_MARKS else (event,):
            if 0.0 <= one.at <= LATEST_S:
                (self._log if one.at >= CLOCK_SET_S else self._unset).add(one)
            else:
                self._absurd_times = True

    def settle(self, settled: Mapping[int, Sequence[SettledStep]], of_every_job: JobEvents) -> None:
        """Keep these steps of each generation instead of all before them, and forget what no longer counts."""
        elections = self._log.elections | of_every_job._log.elections
        of_every_job._log.forget_signals(elections)
        self._log.forget_signals(elections)
        if self._log.is_empty:
            self._unset.settle(settled)
            return
        self._log.settle(settled)
        for events in (self, of_every_job):
            if not events._unset.is_empty:
                events._unset = JobLog(first_at=events._unset.first_at)

    def can_settle(self) -> set[int]:
        """The generations of which only sensors' summaries are logged."""
        log = self._unset if self._log.is_empty else self._log
        return {number for number, of in log.generations.items() if of.steps.can_settle}

    @property
    def n_values(self) -> int:
        """How many steps, phases and signals are kept: a measure of the memory it needs."""
        return self._log.n_values + self._unset.n_values

    def history(self, name: str, of_every_job: JobEvents, now: float | None) -> History:
        """The history, including events that concern every job."""
        if self._log.is_empty:
            found, unset_clocks = self._unset.history(name, of_every_job._unset, now), False
        else:
            found = self._log.history(name, of_every_job._log, now)
            unset_clocks = not (self._unset.is_empty and of_every_job._unset.is_empty)
        absurd_times = self._absurd_times or of_every_job._absurd_times
        return msgspec.structs.replace(found, absurd_times=absurd_times, unset_clocks=unset_clocks)


class SeveralJobs(UsageError):
    """The log has several jobs, and none was chosen."""


def build(events: Iterable[Event], *, job: str | None = None, now: float | None = None) -> History:
    """The history of one job: up to its end, else up to `now`, else up to the last event.

    Iterates over `events` once. Raises NotFound if the log has no such job, SeveralJobs if it has several and none was
    chosen.
    """
    builder = HistoryBuilder(job)
    builder.add(events)
    return builder.history(now)


class HistoryBuilder(msgspec.Struct):
    """Collects events with `add`; `history` returns the history so far, any number of times."""

    _job: str | None = None
    _by_job: dict[str, JobEvents] = {}
    _of_every_job: JobEvents = msgspec.field(default_factory=JobEvents)

    def add(self, events: Iterable[Event]) -> None:
        """Add events; none is kept."""
        by_job, job = self._by_job, self._job
        for event in events:
            name = event.job
            if not name and event.kind in OF_EVERY_JOB:
                self._of_every_job.add(event)
                continue
            log = by_job.get(name)
            if log is None:
                log = by_job[name] = JobEvents()
            if job is None or name == job:
                log.add(event)

    def settle(self, settled: Mapping[int, Sequence[SettledStep]]) -> None:
        """Keep these steps of the chosen job's generations instead of all before them."""
        self._by_job[choose_job(self._by_job, self._job)].settle(settled, self._of_every_job)

    def can_settle(self) -> set[int]:
        """The chosen job's generations of which only sensors' summaries are logged; none before its first event."""
        return set().union(*(log.can_settle() for name, log in self._by_job.items() if name == self._job))

    @property
    def n_values(self) -> int:
        """How many steps, phases and signals are kept."""
        return sum(log.n_values for log in (*self._by_job.values(), self._of_every_job))

    def history(self, now: float | None = None) -> History:
        """The history so far. Raises the same errors as `build`."""
        name = choose_job(self._by_job, self._job)
        return self._by_job[name].history(name, self._of_every_job, now)


def choose_job(names: Iterable[str], job: str | None) -> str:
    """The job to report on. Raises NotFound if the log lacks it, SeveralJobs if none was chosen from several."""
    names = sorted(names)
    if job is not None:
        if job not in names:
            raise NotFound(f"The log has no event of job {job!r}.", hint=f"it has: {', '.join(names) or 'no job'}")
        return job
    named = [name for name in names if name] or names
    if not named:
        raise NotFound("The log has no event of any job.", hint="give the log of a job that was submitted")
    if len(named) > 1:
        raise SeveralJobs(f"The log holds {len(named)} jobs.", hint=f"choose one of: {', '.join(named)}")
    return named[0]
