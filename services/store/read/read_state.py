"""The present state for users: jobs with their ranks, hosts, verified copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobSpec
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import EngineStatus, loss_value
from services.record.codec import load, plain, shown
from services.rules.recovery_point import newest_step
from services.runtime.paging import Page
from services.store.reports import persistent_steps, vouching
from services.store.reports.rank_rows import KnownRank, known_ranks
from services.store.reports.shared_reads import HAS_ENDED, newest_lineage, open_incidents
from services.store.sql import tables

Json = dict[str, Any]
_OF = tables.drains.c.host_id == tables.hosts.c.host_id
_FIRST = Page()
_LOST = {HostState.SILENT.value, HostState.IN_REPAIR.value}


def moment(at: float) -> float | None:
    """Turn the tables' 0.0, which means never, into None."""
    return at or None


def jobs(
    connection: Connection, name: str | None = None, page: Page = _FIRST, *, open_only: bool = False
) -> list[Json]:
    """Return a page of all jobs (or of those that have not ended), oldest first, or the one with that name. Each has
    the newest granted generation."""
    columns = tables.jobs.c
    query = select(tables.jobs).order_by(columns.submitted_at.desc(), columns.job.desc()).limit(page.limit)
    if name is not None:
        query = query.where(columns.job == name)
    if open_only:
        query = query.where(~HAS_ENDED)
    if page.before:
        at = select(columns.submitted_at).where(columns.job == page.before).scalar_subquery()
        query = query.where((columns.submitted_at < at) | ((columns.submitted_at == at) & (columns.job < page.before)))
    rows = connection.execute(query).all()[::-1]
    plans = _plans(connection, [row.job for row in rows])
    newest = {row.job: row.generation for row in rows}
    given = {job: {host.host_id: host.ranks for host in plan.hosts} for job, plan in plans.items()}
    known = known_ranks(connection, newest, given)
    times = progress(connection, [row.job for row in rows])
    apart = _save_intervals(connection, plans)
    return [
        _job(row, plans.get(row.job), known.get(row.job, {}), times.get(row.job, JobProgress()))
        | {"save_interval": apart.get(row.job)}
        for row in rows
    ]


def _plans(connection: Connection, names: Collection[str]) -> dict[str, GenerationPlan]:
    of_jobs = (tables.jobs.c.job == tables.generations.c.job) & (
        tables.jobs.c.generation == tables.generations.c.generation
    )
    query = select(tables.generations.c.plan).join(tables.jobs, of_jobs).where(tables.jobs.c.job.in_(sorted(names)))
    plans: list[GenerationPlan] = [load(document, GenerationPlan) for document in connection.scalars(query)]
    return {plan.job: plan for plan in plans}


def _save_intervals(connection: Connection, plans: Mapping[str, GenerationPlan]) -> dict[str, Json]:
    """Return each job's interval of saved steps, as reported by the engine that decides it: rank 0's."""
    leaders = {plan.job: host.host_id for plan in plans.values() for host in plan.hosts if 0 in host.ranks}
    hosts = tables.hosts.c
    query = select(hosts.host_id, hosts.engine).where(hosts.host_id.in_(sorted(set(leaders.values()))))
    engines: dict[str, EngineStatus] = {
        row.host_id: load(row.engine, EngineStatus) for row in connection.execute(query)
    }
    return {
        reported.job: {"wanted_steps": reported.wanted_steps, "every_steps": reported.every_steps}
        | {"save_s": reported.save_s, "step_s": reported.step_s}
        for job, host_id in leaders.items()
        for reported in (engines[host_id].intervals if host_id in engines else ())
        if (reported.job, reported.generation) == (job, plans[job].generation)
    }


def _job(row: Row[Any], plan: GenerationPlan | None, known: Mapping[int, KnownRank], times: JobProgress) -> Json:
    spec: JobSpec = load(row.spec, JobSpec)
    placed = [(rank, host.host_id) for host in plan.hosts for rank in host.ranks] if plan else []
    return {
        "job": row.job,
        "spec": plain(shown(spec)),
        "state": row.state,
        "message": row.message,
        "world_size": spec.world_size,
        "generation": row.generation,
        "restart_count": plan.restart_count if plan else 0,
        "restarts_used": plan.used_restarts if plan else 0,
        "newest_step": row.newest_step,
        "loss": {"value": loss_value(float(row.loss)), "step": row.loss_step} if row.loss else None,
        "submitted_at": row.submitted_at,
        "ended_at": moment(row.ended_at),
        "since": moment(row.ended_at) or times.started_at or row.submitted_at,
        "started_at": times.started_at,
        "generation_started_at": times.generation_started_at,
        "last_step_at": times.last_step_at,
        "last_report_at": max((rank.reported_at for rank in known.values()), default=0.0) or None,
        "step_s": times.step_s,
        "stop_requested": bool(row.stop_requested),
        "ranks": [_rank(rank, host_id, known.get(rank)) for rank, host_id in sorted(placed)],
    }


def _rank(rank: int, host_id: str, known: KnownRank | None) -> Json:
    if known is None:
        return {"rank": rank, "host_id": host_id, "pid": None, "step": -1, "phase": "waiting"} | _NOTHING
    exited = known.exited
    return {
        "rank": rank,
        "host_id": host_id,
        "pid": known.pid or None,
        "step": known.step,
        "phase": "exited" if exited else known.phase.name.lower(),
        "reported_at": moment(known.reported_at),
        "exit_code": exited.exit_code if exited else None,
        "signal_number": exited.signal_number if exited else None,
    }


_NOTHING: Json = {"reported_at": None, "exit_code": None, "signal_number": None}


def hosts(
    connection: Connection, host_id: str | None = None, page: Page = _FIRST, *, also_left: bool = False
) -> list[Json]:
    """Return a page of the hosts by name, or the one with that name, each with the job that has ranks on it. Omits
    hosts that left in an orderly way, unless `also_left`."""
    names = set(connection.scalars(select(tables.jobs.c.job).where(~HAS_ENDED)))
    placed = {
        host.host_id: (plan.job, list(host.ranks)) for plan in _plans(connection, names).values() for host in plan.hosts
    }
    query = (
        select(tables.hosts, tables.host_reports.c.received_at)
        .join(tables.host_reports, tables.host_reports.c.host_id == tables.hosts.c.host_id)
        .order_by(tables.hosts.c.host_id.desc())
        .limit(page.limit)
    )
    received_at = vouching.received_at(connection)
    if host_id is not None:
        query = query.where(tables.hosts.c.host_id == host_id)
    elif not also_left:
        query = query.where((tables.hosts.c.left_at == 0.0) | tables.hosts.c.host_id.in_(sorted(placed)))
    if page.before:
        query = query.where(tables.hosts.c.host_id < page.before)
    drains = _drains(connection)
    return [
        _host(row, *placed.get(row.host_id, ("", [])), received_at.get(row.host_id, 0.0))
        | {"drain": drains.get(row.host_id)}
        for row in connection.execute(query).all()[::-1]
    ]


def _drains(connection: Connection) -> dict[str, Json]:
    """Return host -> its drain request and state. A host is drained once its ranks train elsewhere."""
    drains, host_state = tables.drains, tables.hosts.c.state.label("host_state")
    rows = connection.execute(select(drains, host_state).join(tables.hosts, _OF)).all()
    if not rows:
        return {}
    moving = {incident.host_id for incident in open_incidents(connection)}
    return {
        row.host_id: {
            "state": "drained"
            if row.state == DrainState.REQUESTED and row.host_state == HostState.CORDONED and row.host_id not in moving
            else row.state,
            "requested_at": row.requested_at,
            "deadline_at": row.deadline_at,
            "reason": row.reason,
            "message": row.message,
        }
        for row in rows
    }


def _host(row: Row[Any], job: str, ranks: list[int], received_at: float) -> Json:
    engine: EngineStatus = load(row.engine, EngineStatus)
    copies: list[ShardCopy] = load(row.copies, list[ShardCopy])
    return {
        "host_id": row.host_id,
        "state": row.state,
        "since": row.since,
        "reason": row.reason,
        "job": job,
        "ranks": ranks,
        "address": row.address,
        "failure_domain": row.failure_domain,
        "daemon_version": row.daemon_version,
        "daemon_pid": row.pid,
        "joined_at": row.joined_at,
        "left_at": moment(row.left_at),
        "last_report_at": max(row.received_at, received_at),
        "report_interval_s": row.interval_s,
        "preempt_deadline_at": moment(row.preempt_deadline_at),
        "engine_address": row.engine_address,
        "engine_alive": engine.alive,
        "unreachable_peers": list(engine.unreachable_peers),
        "counters": dict(engine.counters),
        "copies": len(copies),
        "copies_size_bytes": sum(copy.size_bytes for copy in copies),
    }


def checkpoints(connection: Connection, job: str) -> list[Json]:
    """Return the job's copies (an empty list if there is no such job). Copies on lost hosts are listed, but do not
    count."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    if row is None:
        return []
    spec: JobSpec = load(row.spec, JobSpec)
    lost: set[str] = set()
    copies: list[ShardCopy] = list(persistent_steps.read(connection, [job]))
    for host in connection.execute(select(tables.hosts).order_by(tables.hosts.c.host_id)):
        copies += [copy for copy in load(host.copies, list[ShardCopy]) if copy.job == job]
        if host.state in _LOST or host.left_at:
            lost.add(host.host_id)
    lineage = newest_lineage(connection, job) or ()
    reachable = [copy for copy in copies if copy.host_id not in lost]
    point = newest_step(reachable, lineage, spec.world_size)
    return [
        {
            "job": job,
            "world_size": spec.world_size,
            "newest_step": row.newest_step,
            "recovery_point": point if point is not None else -1,
            "lineage": plain(lineage),
            "tiers": {tier.value: _tier([c for c in reachable if c.tier is tier], lineage, spec) for tier in Tier},
            "copies": [
                plain(copy) | {"reachable": copy.host_id not in lost}
                for copy in sorted(copies, key=lambda c: (-c.step, c.rank, c.tier.value, c.host_id))
            ],
        }
    ]


def _tier(copies: list[ShardCopy], lineage: Lineage, spec: JobSpec) -> Json:
    point = newest_step(copies, lineage, spec.world_size)
    return {
        "copies": len(copies),
        "size_bytes": sum(copy.size_bytes for copy in copies),
        "newest_step": max((copy.step for copy in copies), default=-1),
        "newest_complete_step": point if point is not None else -1,
    }


# --- progress --------------------------------------------------------------------------------------------------------

MAX_JOBS = 50  # of a page; for each of them the end of its event log is read
NEWEST_EVENTS = 4  # a sensor summarizes steps about once a second
LEAST_STEPS = 3  # in one summary, to measure the duration of a step


class JobProgress(msgspec.Struct, frozen=True):
    """Times are wall clock; None: unknown."""

    started_at: float | None = None  # of the first generation
    generation_started_at: float | None = None  # of the newest one that was started
    last_step_at: float | None = None
    step_s: float | None = None  # recent median


def progress(connection: Connection, jobs: Sequence[str]) -> dict[str, JobProgress]:
    """Return the progress of each of these jobs. With more than MAX_JOBS, only the last ones include steps."""
    generations = tables.generations.c
    query = (
        select(generations.job, func.min(generations.started_at), func.max(generations.started_at))
        .where(generations.job.in_(sorted(jobs)), generations.started_at > 0.0)
        .group_by(generations.job)
    )
    found = {job: JobProgress(first, newest) for job, first, newest in connection.execute(query)}
    for job in list(jobs)[-MAX_JOBS:]:
        if job in found:
            last_step_at, step_s = _steps(connection, job)
            found[job] = msgspec.structs.replace(found[job], last_step_at=last_step_at, step_s=step_s)
    return found


def _steps(connection: Connection, job: str) -> tuple[float | None, float | None]:
    events = tables.events.c
    query = (
        select(events.document)
        .where(events.job == job, events.kind == EventKind.STEPS.value)
        .order_by(events.number.desc())
        .limit(NEWEST_EVENTS)
    )
    times = [_completed(load(document, Event)) for document in connection.scalars(query)]
    gaps = [later - earlier for found in times if len(found) >= LEAST_STEPS for earlier, later in pairwise(found)]
    return max((at for found in times for at in found), default=None), median(gaps) if gaps else None


def _completed(event: Event) -> list[float]:
    times = event.data.get("completed_at")
    return [float(at) for at in times if isinstance(at, int | float)] if isinstance(times, list) else []
