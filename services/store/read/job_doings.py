"""What jobs do now, from the newest reports of their hosts. See services.rules.job_doing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from flyball.contracts.cluster import JobState, Phase
from flyball.contracts.decisions import Incident
from services.record.codec import plain
from services.rules import incident_clock
from services.rules.job_doing import ObservedJob, OpenIncident, SeenRank, doing_of, trains
from services.store.reports.rank_rows import KnownRank, known_ranks
from services.store.sql import tables
from services.store.sql.lease import database_now
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import incident_of, plan_of

Json = dict[str, Any]
Given = Mapping[str, Collection[int]]  # host -> its ranks


class FoundJob(msgspec.Struct, frozen=True):
    """A job's row and its progress. Moments are wall clock; None: unknown."""

    job: str
    generation: int
    state: JobState
    message: str
    newest_step: int
    since: float
    last_step_at: float | None
    step_s: float | None
    steps_per_s: float
    some: Given  # some of its hosts
    hosts: int  # how many it has


def doings(connection: Connection, jobs: Sequence[FoundJob]) -> dict[str, Json]:
    """Return what each job does. Of a job of many hosts some are looked at, and all only if those make no step."""
    now, alive = database_now(connection), [job for job in jobs if not job.state.ended]
    seen = _seen(connection, {job.job: job.generation for job in alive}, {job.job: job.some for job in alive})
    for job in alive:
        if len(job.some) < job.hosts and not trains(seen.get(job.job, ()), job.step_s or 0.0, now):
            plan = plan_of(connection, job.job, job.generation)
            given = {host.host_id: host.ranks for host in plan.hosts} if plan else {}
            seen |= _seen(connection, {job.job: job.generation}, {job.job: given})
    incidents = _incidents(connection, [job.job for job in alive])
    return {
        job.job: plain(
            doing_of(
                ObservedJob(
                    state=job.state,
                    message=job.message,
                    since=job.since,
                    newest_step=job.newest_step,
                    last_step_at=job.last_step_at or 0.0,
                    step_s=job.step_s or 0.0,
                    steps_per_s=job.steps_per_s,
                    ranks=seen.get(job.job, ()),
                    incidents=incidents.get(job.job, ()),
                ),
                now,
            )
        )
        for job in jobs
    }


def _seen(
    connection: Connection, newest: Mapping[str, int], given: Mapping[str, Given]
) -> dict[str, tuple[SeenRank, ...]]:
    found = known_ranks(connection, newest, given)
    return {job: tuple(_seen_ranks(ranks)) for job, ranks in found.items()}


def _seen_ranks(ranks: Mapping[int, KnownRank]) -> Iterable[SeenRank]:
    for number, rank in sorted(ranks.items()):
        if rank.exited is None and rank.reported_at:
            yield SeenRank(number, Phase(rank.phase), rank.reported_at, rank.moved_at, rank.stand)


def _incidents(connection: Connection, jobs: Sequence[str]) -> Mapping[str, Sequence[OpenIncident]]:
    columns = tables.incidents.c
    query = select(columns.number, columns.job, columns.document).where(~columns.closed, columns.job.in_(sorted(jobs)))
    found: defaultdict[str, list[OpenIncident]] = defaultdict(list)
    for row in connection.execute(query.order_by(columns.number)) if jobs else ():
        incident: Incident | None = readable("incidents", f"inc-{row.number}", incident_of, row.document, job=row.job)
        if incident is not None:
            found[row.job].append(
                OpenIncident(
                    incident.incident_id,
                    incident.cause,
                    incident.state,
                    incident.message,
                    incident_clock.fault_at(incident),
                    incident.holding_for,
                )
            )
    return found
