"""What is: jobs with their ranks, hosts, verified copies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, Row, select

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.signals import EngineStatus, WorkerExited
from services.controller.recovery_point import newest_step
from services.store import tables
from services.store.codec import load, plain, shown
from services.store.view_loader import load_persistent_copies

Json = dict[str, Any]
_LOST = {HostState.SILENT.value, HostState.IN_REPAIR.value}


def moment(at: float) -> float | None:
    """0.0 stands for never in the tables."""
    return at or None


def jobs(connection: Connection, name: str | None = None) -> list[Json]:
    """All jobs or the one of that name, with the newest generation that was granted."""
    query = select(tables.jobs).order_by(tables.jobs.c.submitted_at, tables.jobs.c.job)
    if name is not None:
        query = query.where(tables.jobs.c.job == name)
    rows = connection.execute(query).all()
    plans = _plans(connection, name)
    rank_rows = _rank_rows(connection, name)
    return [_job(row, plans.get(row.job), rank_rows.get(row.job, {})) for row in rows]


def _plans(connection: Connection, name: str | None) -> dict[str, GenerationPlan]:
    query = select(tables.generations.c.plan).join(
        tables.jobs,
        (tables.jobs.c.job == tables.generations.c.job) & (tables.jobs.c.generation == tables.generations.c.generation),
    )
    if name is not None:
        query = query.where(tables.jobs.c.job == name)
    plans: list[GenerationPlan] = [load(document, GenerationPlan) for document in connection.scalars(query)]
    return {plan.job: plan for plan in plans}


def _rank_rows(connection: Connection, name: str | None) -> dict[str, dict[int, Row[Any]]]:
    query = select(tables.ranks).join(
        tables.jobs,
        (tables.jobs.c.job == tables.ranks.c.job) & (tables.jobs.c.generation == tables.ranks.c.generation),
    )
    if name is not None:
        query = query.where(tables.jobs.c.job == name)
    found: defaultdict[str, dict[int, Row[Any]]] = defaultdict(dict)
    for row in connection.execute(query):
        found[row.job][row.rank] = row
    return found


def _job(row: Row[Any], plan: GenerationPlan | None, rank_rows: dict[int, Row[Any]]) -> Json:
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
        "newest_step": row.newest_step,
        "submitted_at": row.submitted_at,
        "ended_at": moment(row.ended_at),
        "stop_requested": bool(row.stop_requested),
        "ranks": [_rank(rank, host_id, rank_rows.get(rank)) for rank, host_id in sorted(placed)],
    }


def _rank(rank: int, host_id: str, row: Row[Any] | None) -> Json:
    if row is None:
        return {"rank": rank, "host_id": host_id, "pid": None, "step": -1, "phase": "waiting"} | _NOTHING
    exited: WorkerExited | None = load(row.exited, WorkerExited) if row.exited else None
    return {
        "rank": rank,
        "host_id": host_id,
        "pid": row.pid or None,
        "step": row.step,
        "phase": "exited" if exited else Phase(row.phase).name.lower(),
        "reported_at": moment(row.reported_at),
        "exit_code": exited.exit_code if exited else None,
        "signal_number": exited.signal_number if exited else None,
    }


_NOTHING: Json = {"reported_at": None, "exit_code": None, "signal_number": None}


def hosts(connection: Connection) -> list[Json]:
    """All hosts, with the job that has ranks on each."""
    running = select(tables.jobs.c.job).where(
        tables.jobs.c.state.in_([state.value for state in JobState if not state.ended])
    )
    names = set(connection.scalars(running))
    placed = {
        host.host_id: (plan.job, list(host.ranks))
        for plan in _plans(connection, None).values()
        if plan.job in names
        for host in plan.hosts
    }
    return [
        _host(row, *placed.get(row.host_id, ("", [])))
        for row in connection.execute(select(tables.hosts).order_by(tables.hosts.c.host_id))
    ]


def _host(row: Row[Any], job: str, ranks: list[int]) -> Json:
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
        "last_report_at": row.last_report_at,
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
    """The job's copies (an empty list if there is no such job). Copies on lost hosts are shown and do not count."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    if row is None:
        return []
    spec: JobSpec = load(row.spec, JobSpec)
    lost: set[str] = set()
    copies: list[ShardCopy] = list(load_persistent_copies(connection, [job]))
    for host in connection.execute(select(tables.hosts).order_by(tables.hosts.c.host_id)):
        copies += [copy for copy in load(host.copies, list[ShardCopy]) if copy.job == job]
        if host.state in _LOST:
            lost.add(host.host_id)
    lineage = _lineage(connection, job)
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


def _lineage(connection: Connection, job: str) -> Lineage:
    """The history that the newest started generation continues."""
    generations = tables.generations
    document = connection.scalar(
        select(generations.c.lineage)
        .where(generations.c.job == job, generations.c.started_at > 0.0)
        .order_by(generations.c.generation.desc())
        .limit(1)
    )
    lineage: Lineage = load(document, Lineage) if document else ()
    return lineage
