"""Limits what hosts report once to the ranks that they were given: sensors let it pass while a placement is new."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection

from flyball.contracts.checkpoints import RestoreReport, ShardCopy
from flyball.contracts.reports.signals import RankMarks, Report
from services.store.sql.shared_reads import GivenPlans


def own_part(connection: Connection, report: Report, plans: GivenPlans) -> Report:
    """The report without moments in the life of ranks that its host was not given. They come once, so a sensor that
    does not know a generation yet lets them pass."""
    if not report.marks and not report.restores:
        return report
    host_id = report.facts.host_id

    def is_own(part: RankMarks | RestoreReport) -> bool:
        return part.rank in plans.read(connection, part.job, part.generation).get(host_id, ())

    marks, restores = tuple(filter(is_own, report.marks)), tuple(filter(is_own, report.restores))
    if (marks, restores) == (report.marks, report.restores):
        return report
    return msgspec.structs.replace(report, marks=marks, restores=restores)


def has_ranks(
    connection: Connection, host_id: str, copy: ShardCopy, newest: Mapping[str, int], plans: GivenPlans
) -> bool:
    """Whether the host has ranks of the copy's generation, or of the job's newest: it lists what is in the store."""
    generations_of = (copy.generation, newest.get(copy.job, -1))
    return any(host_id in plans.read(connection, copy.job, generation) for generation in generations_of)
