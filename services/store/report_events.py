"""What is new in a report, compared with what is stored of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from flyball.contracts.checkpoints import RestoreReport, ShardCopy
from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.events import Event, EventKind
from flyball.contracts.signals import RankMarks, RankSteps, Report
from services.store.codec import dump, load

RankKey = tuple[str, int, int]  # job, generation, rank
EventData: TypeAlias = Mapping[str, str | int | float | bool | list[float | str] | None]


class RankRow(msgspec.Struct):
    """A row of the ranks table, as far as reports change it."""

    host_id: str = ""
    pid: int = 0
    step: int = -1
    phase: int = Phase.STARTING
    reported_at: float = 0.0
    marks: str | None = None
    restored_at: float = 0.0
    restored: str | None = None


def parts_of(
    report: Report,
) -> tuple[Sequence[RankStatus | RankSteps | RankMarks | RestoreReport | ShardCopy], ...]:
    """Everything in a report that names a job."""
    return report.ranks, report.steps, report.marks, report.restores, report.copies


def ranks_of(report: Report) -> set[RankKey]:
    """The ranks of which a report says something new, copies apart: those lie on hosts that do not run the rank."""
    return {(part.job, part.generation, part.rank) for parts in parts_of(report)[:-1] for part in parts}


def merge(
    rows: dict[RankKey, RankRow],
    report: Report,
    received_at: float,
    *,
    granted: Collection[tuple[str, int]],
    is_current: bool,
) -> Iterator[Event]:
    """Bring `rows` up to date and yield the events that this takes. Of a report that came late (not `is_current`) the
    status of the ranks is old and does not count; steps, marks and restores always do."""
    host_id = report.facts.host_id
    if is_current:
        for status in report.ranks:
            if (status.job, status.generation) in granted:
                yield from _status(rows[status.job, status.generation, status.rank], status, report, received_at)
    for steps in report.steps:
        if (steps.job, steps.generation) in granted and steps.completed_at:
            row = rows[steps.job, steps.generation, steps.rank]
            row.host_id = row.host_id or host_id
            row.step = max(row.step, steps.first_step + len(steps.completed_at) - 1)
            data: EventData = {"first_step": steps.first_step, "completed_at": list(steps.completed_at)}
            yield _event(steps, EventKind.STEPS, steps.completed_at[-1], host_id, data)
    for marks in report.marks:
        if (marks.job, marks.generation) in granted:
            yield from _marks(rows[marks.job, marks.generation, marks.rank], marks, report)
    for restored in report.restores:
        if (restored.job, restored.generation) in granted:
            yield from _restored(rows[restored.job, restored.generation, restored.rank], restored, host_id)


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
    }
    yield _event(marks, EventKind.RANK_MARKS, report.sent_at, report.facts.host_id, data)


def _reached(marks: RankMarks) -> tuple[int, float]:
    moments = (marks.spawned_at, marks.attached_at, marks.restore_began_at, marks.restored_at, marks.first_step_at)
    return sum(moment > 0.0 for moment in moments), marks.save_blocked_s


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
        "seconds": restored.seconds,
    }
    yield _event(restored, EventKind.RESTORED, restored.at, host_id, data)


def _event(
    part: RankStatus | RankSteps | RankMarks | RestoreReport,
    kind: EventKind,
    at: float,
    host_id: str,
    data: EventData,
) -> Event:
    return Event(at=at, kind=kind, job=part.job, generation=part.generation, rank=part.rank, host_id=host_id, data=data)
