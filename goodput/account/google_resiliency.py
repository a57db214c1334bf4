"""Goodput exactly as Google's resiliency library computes it: `--method google-resiliency`. Pure.

Source: AI-Hypercomputer/resiliency, `resiliency/goodput_measure/calculator.py` (2025), described in its README:

    goodput_percentage = 100 x (max_saved_step - min_loaded_step) x reference_step_time / total_runtime_seconds

total_runtime_seconds lasts from the first entry to the last, of any type, by the wall clock as written. There are no
categories; recomputed steps cost nothing but their time. docs/reference/goodput/importers.md compares it with Flyball's
own measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from flyball.contracts.errors import NotFound, UsageError


class EntryKind(StrEnum):
    """In the order in which entries of the same moment are processed."""

    USER_SCHEDULED = "user_scheduled"
    JOB_STARTED = "job_started"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    CHECKPOINT_SAVED = "checkpoint_saved"
    USER_TERMINATED = "user_terminated"
    JOB_TERMINATED = "job_terminated"


_ORDER: dict[str, int] = {kind: place for place, kind in enumerate(EntryKind)}
_ONE_OF_A_RUN = (EntryKind.JOB_STARTED, EntryKind.JOB_TERMINATED)


class LogEntry(NamedTuple):
    """One line of the library's log, unchanged."""

    timestamp: str  # ISO 8601
    event_type: str  # an EntryKind, or a type from a newer or modified library
    step: float | None = 0  # None: not a number
    job: str = ""


class GoogleGoodput(msgspec.Struct, frozen=True):
    """The library's own keys.

    Step fields are None where the library omits them: without a reference step time, if nothing was loaded, or if no
    step beyond the smallest loaded one was saved.
    """

    total_events: int
    job_started_count: int
    checkpoints_loaded: int  # only steps above 0
    checkpoints_saved: int
    total_runtime_seconds: float
    min_loaded_step: float | None
    max_saved_step: float | None
    step_diff: float | None
    effective_computation_time: float
    goodput_percentage: float


def measure(
    entries: Iterable[LogEntry], *, reference_step_time_s: float | None = None, job: str | None = None
) -> GoogleGoodput:
    """Measure one job's entries, given in any order.

    Raises NotFound if the log lacks the job, UsageError if none was chosen from several or the reference step time is
    not above 0.
    """
    if reference_step_time_s is not None and not reference_step_time_s > 0:
        raise UsageError("The reference step time must be above 0.", hint="give the seconds of an undisturbed step")
    log = collapsed(_of_job(entries, job))
    loaded = [e.step for e in log if e.event_type == EntryKind.CHECKPOINT_LOADED and e.step is not None]
    saves = [e.step for e in log if e.event_type == EntryKind.CHECKPOINT_SAVED]
    max_saved = max((step for step in saves if step is not None), default=0)
    runtime_s = (_moment(log[-1]) - _moment(log[0])).total_seconds()
    progress = max_saved - min(loaded) if loaded else 0
    counted = progress > 0 and max_saved > 0 and reference_step_time_s is not None
    effective_s = progress * reference_step_time_s if counted and reference_step_time_s is not None else 0.0
    return GoogleGoodput(
        total_events=len(log),
        job_started_count=sum(1 for e in log if e.event_type == EntryKind.JOB_STARTED),
        checkpoints_loaded=sum(1 for step in loaded if step > 0),
        checkpoints_saved=len(saves),
        total_runtime_seconds=runtime_s,
        min_loaded_step=min(loaded) if counted else None,
        max_saved_step=max_saved if counted else None,
        step_diff=progress if counted else None,
        effective_computation_time=effective_s,
        goodput_percentage=effective_s / runtime_s * 100 if runtime_s > 0 else 0.0,
    )


def collapsed(entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Sort entries by their timestamps as text, and keep only the last of consecutive starts or terminations. If the
    first entry is not the job's scheduling, add one with the same time."""
    log = sorted(entries, key=lambda e: (e.timestamp, _ORDER.get(e.event_type, len(_ORDER))))
    if log and log[0].event_type != EntryKind.USER_SCHEDULED:
        log.insert(0, log[0]._replace(event_type=EntryKind.USER_SCHEDULED))
    kept: list[LogEntry] = []
    for entry in log:
        if kept and entry.event_type in _ONE_OF_A_RUN and kept[-1].event_type == entry.event_type:
            kept.pop()
        kept.append(entry)
    return kept


def _moment(entry: LogEntry) -> datetime:
    """Wall-clock time; the zone, and changes of its offset, make no difference."""
    at = datetime.fromisoformat(entry.timestamp)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _of_job(entries: Iterable[LogEntry], job: str | None) -> Sequence[LogEntry]:
    by_job: dict[str, list[LogEntry]] = {}
    for entry in entries:
        by_job.setdefault(entry.job, []).append(entry)
    names = ", ".join(sorted(by_job))
    if job is not None:
        if job not in by_job:
            raise NotFound(f"The log has no entry of job {job!r}.", hint=f"it has: {names or 'no job'}")
        return by_job[job]
    if not by_job:
        raise NotFound("The log has no entry of any job.", hint="give a log of the resiliency library")
    if len(by_job) > 1:
        raise UsageError(f"The log holds {len(by_job)} jobs.", hint=f"choose one with --job: {names}")
    return next(iter(by_job.values()))
