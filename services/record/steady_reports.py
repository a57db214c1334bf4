"""Tells whether a report has no more than newer positions, compared with what is stored of its host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from flyball.contracts.reports.signals import Report
from services.record.positions import AS_STORED, SteadyPositions
from services.record.report_events import RankKey, RankRow, ranks_of

REWRITE_AFTER_S = 600.0  # rows that are read without their newer positions are no older than this


class StoredReport(msgspec.Struct, frozen=True, gc=False):
    """The report from which a host's row was written, and what later ones told."""

    report: Report
    version: int  # of the row
    received_at: float
    places: Mapping[RankKey, int]  # the ranks in the row
    newest: SteadyPositions  # what was stored last


def stored_report(
    report: Report,
    received_at: float,
    version: int,
    rows: Mapping[RankKey, RankRow],
    *,
    given: Mapping[tuple[str, int], Collection[int]],
) -> StoredReport | None:
    """Return what was stored, if the host's row has all ranks of the report. `rows`: in the row's order. `given`: of
    each generation, the ranks that the host has: only these advance their job."""
    if not ranks_of(report) <= rows.keys() or any(rank not in given.get((job, gen), ()) for job, gen, rank in rows):
        return None
    places = {key: place for place, key in enumerate(rows)}
    steps = tuple(row.step for row in rows.values())
    first = SteadyPositions(report.facts.host_id, version, report.sent_at, received_at, steps)
    return StoredReport(report, version, received_at, places, first)


def steady_positions(known: StoredReport, report: Report, received_at: float) -> SteadyPositions | None:
    """Return the newer positions, None if the report tells anything else, or came late."""
    before = known.report
    is_same = (
        report.incarnation == before.incarnation
        and report.workers == before.workers
        and report.facts == before.facts
        and report.engine == before.engine
        and report.copies == before.copies
        and report.interval_s == before.interval_s
        and not (report.marks or report.restores or report.leaves)
        and [progress.phases for progress in report.progress] == [progress.phases for progress in before.progress]
        and received_at - known.received_at < REWRITE_AFTER_S
    )
    if not is_same or report.sent_at <= known.newest.sent_at:
        return None
    steps = [AS_STORED] * len(known.places)
    for workers, progress in zip(report.workers, report.progress, strict=True):
        for rank, step in zip(workers.ranks, progress.steps, strict=True):
            place = known.places[workers.job, workers.generation, rank]
            steps[place] = max(step, known.newest.step(place))
    for completed in report.completed:
        for rank in completed.ranks:
            place = known.places.get((completed.job, completed.generation, rank), -1)
            if place < 0 or steps[place] == AS_STORED:
                return None
            steps[place] = max(steps[place], completed.last_step)
    together = tuple(steps[:1] if len(set(steps)) == 1 else steps)
    return SteadyPositions(report.facts.host_id, known.version, report.sent_at, received_at, together)
