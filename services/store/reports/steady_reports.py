"""Tells whether a report has no more than newer positions, compared with what is stored of its host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from flyball.contracts.reports.rank_columns import CompletedSteps
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
    of_workers: tuple[tuple[int, ...], ...]  # the places of the ranks of each of the report's workers
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
    of_workers = tuple(tuple(places[of.job, of.generation, rank] for rank in of.ranks) for of in report.workers)
    return StoredReport(report, version, received_at, places, of_workers, first)


def steady_positions(known: StoredReport, report: Report, received_at: float) -> SteadyPositions | None:
    """Return the newer positions, None if the report tells anything else, or came late."""
    before, newest = known.report, known.newest
    is_same = (
        report.incarnation == before.incarnation
        and report.interval_s == before.interval_s
        and _is(report.workers, before.workers)
        and _is(report.facts, before.facts)
        and _is(report.engine, before.engine)
        and _is(report.copies, before.copies)
        and not (report.marks or report.restores or report.leaves)
        and all(now.phases == then.phases for now, then in zip(report.progress, before.progress, strict=True))
        and len(report.progress) <= 1  # `still_s` is of one job
        and not any(progress.stands for progress in (*report.progress, *before.progress))
        and received_at - known.received_at < REWRITE_AFTER_S
    )
    if not is_same or report.sent_at <= newest.sent_at:
        return None
    steps = [AS_STORED] * len(known.places)
    for places, progress in zip(known.of_workers, report.progress, strict=True):
        for place, step in zip(places, progress.steps, strict=True):
            steps[place] = max(step, newest.step(place))
    for completed in report.completed:
        places = _places(known, completed)
        if any(place < 0 or steps[place] == AS_STORED for place in places):
            return None
        for place in places:
            steps[place] = max(steps[place], completed.last_step)
    together = tuple(steps[:1] if len(set(steps)) == 1 else steps)
    still_s = min((min(progress.beacon_ages_s) for progress in report.progress), default=0.0)
    return SteadyPositions(report.facts.host_id, known.version, report.sent_at, received_at, together, still_s)


def _is(value: object, before: object) -> bool:
    """Whether they are equal: a sensor mostly has the same object."""
    return value is before or value == before


def _places(known: StoredReport, completed: CompletedSteps) -> tuple[int, ...]:
    """Return the places of the ranks, -1 for one that the row does not have."""
    job, generation = completed.job, completed.generation
    for workers, places in zip(known.report.workers, known.of_workers, strict=True):
        if workers.ranks == completed.ranks and (workers.job, workers.generation) == (job, generation):
            return places
    return tuple(known.places.get((job, generation, rank), -1) for rank in completed.ranks)
