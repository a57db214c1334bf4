"""Finds what is new in a report, compared with the stored state of its ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from flyball.contracts.checkpoints import RestoreReport, ShardCopy
from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.events import Event, EventKind, summed_up
from flyball.contracts.reports.rank_columns import CompletedSteps, Workers, statuses_in
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import RankMarks, Report
from flyball.contracts.reports.succession import is_given_up, speaks_for_host
from services.record.codec import dump, load
from services.sensor.rules.step_log import StepSummary

RankKey = tuple[str, int, int]  # job, generation, rank
EventData: TypeAlias = Mapping[str, str | int | float | bool | list[int | float | str] | None]


LATE_S = 30.0  # an older report than the newest came late, up to this age; beyond it, the host's clock was set back


class Before(msgspec.Struct, frozen=True):
    """The stored facts about a host's newest report."""

    incarnation: str = ""
    sent_at: float = 0.0
    received_at: float = 0.0
    interval_s: float = 0.0
    has_left: bool = False


Received: TypeAlias = tuple[Report, float]  # with the wall clock of its receipt


class RankRow(msgspec.Struct):
    """The part of a row of the ranks table that reports change."""

    host_id: str = ""
    pid: int = 0
    step: int = -1
    phase: int = Phase.STARTING
    reported_at: float = 0.0
    is_gone: bool = False  # a newer incarnation of its host's daemon does not know it
    moved_at: float = 0.0  # when its beacon last moved; 0.0: not known
    stand: RankStand | None = None  # where it stands, if it has stood still for long
    marks: str | None = None
    restored_at: float = 0.0
    restored: str | None = None


def sift(reports: Sequence[Received], known: Mapping[str, Before]) -> tuple[list[Received], dict[str, Received]]:
    """The new reports, and host -> the report whose facts count: the newest, unless all came late. Reports of a second
    daemon of a host are left out: its sensor may not know the first one, which reports elsewhere."""
    newest = dict(known)
    fresh: list[Received] = []
    current: dict[str, Received] = {}
    for report, received_at in reports:
        host_id = report.facts.host_id
        before = newest.get(host_id, Before())
        incarnation, sent_at = before.incarnation, before.sent_at
        if report.incarnation == incarnation and report.sent_at == sent_at:
            continue
        if _is_one_too_many(report, received_at, before):
            continue
        fresh.append((report, received_at))
        is_late = report.incarnation == incarnation and 0.0 < sent_at - report.sent_at < LATE_S
        if not is_late:
            current[host_id] = (report, received_at)
            newest[host_id] = Before(report.incarnation, report.sent_at, received_at, report.interval_s, report.leaves)
    return fresh, current


def _is_one_too_many(report: Report, received_at: float, before: Before) -> bool:
    if before.has_left or speaks_for_host(report.incarnation, report.succeeds, before.incarnation):
        return False
    return not is_given_up(received_at - before.received_at, max(before.interval_s, report.interval_s))


def workers_of(report: Report) -> dict[str, int]:
    """job -> the newest generation of its live workers in a report."""
    generations_of: dict[str, int] = {}
    for workers in report.workers:
        generations_of[workers.job] = max(workers.generation, generations_of.get(workers.job, -1))
    return generations_of


def parts_of(
    report: Report,
) -> tuple[Sequence[Workers | CompletedSteps | RankMarks | RestoreReport | ShardCopy], ...]:
    """All parts of a report that name a job."""
    return report.workers, report.completed, report.marks, report.restores, report.copies


def ranks_of(report: Report) -> set[RankKey]:
    """The ranks that a report is about, except for copies: these may be on hosts that do not run the rank."""
    columns: tuple[Workers | CompletedSteps, ...] = (*report.workers, *report.completed)
    parts: tuple[RankMarks | RestoreReport, ...] = (*report.marks, *report.restores)
    keys = {(part.job, part.generation, rank) for part in columns for rank in part.ranks}
    return keys | {(part.job, part.generation, part.rank) for part in parts}


def merge(
    rows: dict[RankKey, RankRow],
    report: Report,
    received_at: float,
    *,
    granted: Collection[tuple[str, int]],
    is_current: bool,
) -> Iterator[Event]:
    """Update `rows`, and yield the events of that, except for steps (`event_of_steps`). In a late report (not
    `is_current`) the positions of ranks are outdated, and do not count; everything else does."""
    host_id = report.facts.host_id
    if is_current:
        for status in statuses_in(report.workers, report.progress):
            if (status.job, status.generation) in granted:
                yield from _status(rows[status.job, status.generation, status.rank], status, report, received_at)
    for steps in report.completed:
        for rank in steps.ranks if (steps.job, steps.generation) in granted else ():
            row = rows[steps.job, steps.generation, rank]
            row.host_id = row.host_id or host_id
            row.step = max(row.step, steps.last_step)
    found: defaultdict[tuple[EventKind, str, int], list[Event]] = defaultdict(list)
    for marks in report.marks:
        if (marks.job, marks.generation) in granted:
            for event in _marks(rows[marks.job, marks.generation, marks.rank], marks, report):
                found[event.kind, event.job, event.generation].append(event)
    for restored in report.restores:
        if (restored.job, restored.generation) in granted:
            for event in _restored(rows[restored.job, restored.generation, restored.rank], restored, host_id):
                found[event.kind, event.job, event.generation].append(event)
    yield from map(summed_up, found.values())


def mark_gone(rows: Mapping[RankKey, RankRow], report: Report, before: str) -> None:
    """Mark ranks that a host reported, but that its new daemon does not know. `before`: the incarnation of the newest
    earlier report ('': none). A restarted daemon has adopted its workers, and reported how others ended. One that
    knows no ranks was started on an empty machine."""
    if before in ("", report.incarnation):
        return
    known = {(of.job, of.generation, rank) for of in report.workers for rank in of.ranks}
    for key, row in rows.items():
        if row.reported_at and key not in known:
            row.is_gone = True


def event_of_steps(summary: StepSummary) -> Event:
    """The event of a summary."""
    data: dict[str, str | int | float | bool | list[int | float | str] | None] = {
        "first_step": summary.first_step,
        "completed_at": list(summary.completed_at),
        "slowest_step": summary.slowest_step,
        "ranks": summary.ranks,
        "sensor": summary.sensor,
        "save_blocked_s": summary.save_blocked_s,
        "data_wait_s": summary.data_wait_s,
    }
    if summary.loss is not None:
        data |= {"loss": summary.loss, "loss_step": summary.loss_step, "loss_rank": summary.loss_rank}
    return Event(
        at=summary.at,
        kind=EventKind.STEPS,
        job=summary.job,
        generation=summary.generation,
        data=data,
    )


def _status(row: RankRow, status: RankStatus, report: Report, received_at: float) -> Iterator[Event]:
    evaluation = Phase.EVAL.value
    if row.reported_at and row.phase != status.phase and evaluation in (row.phase, status.phase):
        moved_at = report.sent_at - status.beacon_age_s
        data: EventData = {"phase": status.phase.name.lower()}
        yield _event(status, EventKind.PHASE, moved_at, report.facts.host_id, data)
    row.host_id = report.facts.host_id
    row.pid = status.pid
    row.phase = status.phase.value
    row.step = max(row.step, status.step)
    row.reported_at = received_at
    row.is_gone = False
    row.moved_at = received_at - status.beacon_age_s
    row.stand = status.stand


def _marks(row: RankRow, marks: RankMarks, report: Report) -> Iterator[Event]:
    row.host_id = row.host_id or report.facts.host_id
    document = dump(marks)
    before = load(row.marks, RankMarks) if row.marks else None
    if row.marks == document or (before is not None and _reached(before) > _reached(marks)):
        return
    row.marks = document
    data: EventData = {
        "spawned_at": marks.spawned_at,
        "attached_at": marks.attached_at,
        "restore_began_at": marks.restore_began_at,
        "restored_at": marks.restored_at,
        "first_step_at": marks.first_step_at,
        "save_blocked_s": marks.save_blocked_s,
        "data_wait_s": marks.data_wait_s,
    }
    yield _event(marks, EventKind.RANK_MARKS, report.sent_at, report.facts.host_id, data)


def _reached(marks: RankMarks) -> tuple[int, float]:
    moments = (marks.spawned_at, marks.attached_at, marks.restore_began_at, marks.restored_at, marks.first_step_at)
    return sum(moment > 0.0 for moment in moments), marks.save_blocked_s + marks.data_wait_s


def _restored(row: RankRow, restored: RestoreReport, host_id: str) -> Iterator[Event]:
    if restored.at <= row.restored_at:
        return
    row.host_id = row.host_id or host_id
    row.restored_at = restored.at
    row.restored = dump(restored)
    data: EventData = {
        "step": restored.step,
        "source_tier": restored.source_tier.value,
        "source_host": restored.source_host,
        "size_bytes": restored.size_bytes,
        "socket_bytes": restored.socket_bytes,
        "transport": restored.transport,
        "seconds": restored.seconds,
        **{f"{tier}_bytes": size_bytes for tier, size_bytes in restored.tier_bytes.items()},
    }
    yield _event(restored, EventKind.RESTORED, restored.at, host_id, data)


def _event(
    part: RankStatus | RankMarks | RestoreReport,
    kind: EventKind,
    at: float,
    host_id: str,
    data: EventData,
) -> Event:
    return Event(at=at, kind=kind, job=part.job, generation=part.generation, rank=part.rank, host_id=host_id, data=data)
