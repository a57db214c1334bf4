"""Builds the policy's view from the tables: one snapshot, a fixed number of queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, or_, select

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionPlan, ActionState, CommandUpdate, GenerationPlan, Incident
from flyball.contracts.signals import WorkerExited
from services.controller.view import (
    ActionView,
    GenerationView,
    HostView,
    JobView,
    PastFailure,
    RankView,
    View,
)
from services.store.codec import load, number_of
from services.store.tables import (
    actions,
    commands,
    decisions,
    generations,
    hosts,
    incidents,
    job_failures,
    jobs,
    persistent_copies,
    ranks,
)

_ENDED = [state.value for state in JobState if state.ended]
_Rows = Mapping[Any, Sequence[Row[Any]]]


def load_view(connection: Connection) -> View:
    """Jobs that have not ended, or still have something open or workers somewhere; all hosts, open incidents, and their
    actions."""
    open_incidents = tuple(
        load(document, Incident)
        for document in connection.scalars(
            select(incidents.c.document).where(incidents.c.closed.is_(False)).order_by(incidents.c.number)
        )
    )
    action_views = _actions(connection, open_incidents)
    named = {incident.job for incident in open_incidents} | {action.plan.job for action in action_views}
    host_rows = connection.execute(select(hosts).order_by(hosts.c.host_id)).all()
    workers: dict[str, dict[str, int]] = {row.host_id: load(row.workers, dict[str, int]) for row in host_rows}
    job_views = _jobs(connection, named.union(*workers.values()))
    copies = [copy for row in host_rows for copy in load(row.copies, list[ShardCopy])]
    return View(
        jobs=job_views,
        hosts=_hosts(host_rows, workers, job_views),
        incidents=open_incidents,
        actions=action_views,
        copies=(*copies, *load_persistent_copies(connection, [view.spec.job for view in job_views])),
        next_incident=_next(connection, incidents),
        next_decision=_next(connection, decisions),
    )


def load_persistent_copies(connection: Connection, names: Sequence[str]) -> tuple[ShardCopy, ...]:
    """The copies of these jobs that no host owns."""
    if not names:
        return ()
    return tuple(
        ShardCopy(
            job=row.job,
            generation=row.generation,
            step=row.step,
            rank=row.rank,
            tier=Tier.PERSISTENT,
            host_id="",
            size_bytes=row.size_bytes,
            digest=row.digest,
        )
        for row in connection.execute(select(persistent_copies).where(persistent_copies.c.job.in_(sorted(names))))
    )


def _next(connection: Connection, table: Any) -> int:  # noqa: ANN401 - a table's columns have no static type
    return int(connection.scalar(select(func.coalesce(func.max(table.c.number), 0))) or 0) + 1


def _jobs(connection: Connection, named: set[str]) -> tuple[JobView, ...]:
    wanted = or_(jobs.c.state.not_in(_ENDED), jobs.c.job.in_(sorted(named)))
    rows = connection.execute(select(jobs).where(wanted).order_by(jobs.c.submitted_at, jobs.c.job)).all()
    names = [row.job for row in rows]
    if not names:
        return ()
    running = {
        row.job: row
        for row in connection.execute(
            select(generations)
            .join(jobs, (jobs.c.job == generations.c.job) & (jobs.c.generation == generations.c.generation))
            .where(generations.c.job.in_(names))
        )
    }
    rank_rows = _grouped(
        connection.execute(
            select(ranks)
            .join(jobs, (jobs.c.job == ranks.c.job) & (jobs.c.generation == ranks.c.generation))
            .where(ranks.c.job.in_(names))
            .order_by(ranks.c.job, ranks.c.rank)
        ).all()
    )
    failures = _grouped(
        connection.execute(
            select(job_failures).where(job_failures.c.job.in_(names)).order_by(job_failures.c.number)
        ).all()
    )
    return tuple(
        JobView(
            spec=load(row.spec, JobSpec),
            state=JobState(row.state),
            submitted_at=row.submitted_at,
            stop_requested=bool(row.stop_requested),
            generation=_generation(running[row.job], rank_rows[row.job]) if row.job in running else None,
            failures=tuple(
                PastFailure(f.generation, f.cause, f.error_kind, f.error_message, f.step) for f in failures[row.job]
            ),
            newest_step=row.newest_step,
            message=row.message,
            ended_at=row.ended_at,
        )
        for row in rows
    )


def _grouped(rows: Sequence[Row[Any]]) -> _Rows:
    by_job: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_job[row.job].append(row)
    return by_job


def _generation(row: Row[Any], rank_rows: Sequence[Row[Any]]) -> GenerationView:
    plan: GenerationPlan = load(row.plan, GenerationPlan)
    return GenerationView(
        generation=plan.generation,
        parent=plan.parent,
        lineage=load(row.lineage, Lineage) if row.lineage else plan.parent_lineage,
        hosts=plan.hosts,
        peers=plan.peers,
        started_at=row.started_at,
        restore_step=row.restore_step,
        restart_count=plan.restart_count,
        ranks=tuple(
            RankView(
                rank=rank.rank,
                host_id=rank.host_id,
                step=rank.step,
                phase=Phase(rank.phase),
                reported_at=rank.reported_at,
                exited=load(rank.exited, WorkerExited) if rank.exited else None,
                exited_at=rank.exited_at,
            )
            for rank in rank_rows
        ),
    )


def _hosts(
    rows: Sequence[Row[Any]], workers: Mapping[str, Mapping[str, int]], job_views: Sequence[JobView]
) -> tuple[HostView, ...]:
    placed = {
        host.host_id: view.spec.job
        for view in job_views
        if view.generation is not None and not view.state.ended
        for host in view.generation.hosts
    }
    newest = {
        view.spec.job: (view.generation.generation if view.generation else -1, view.state.ended) for view in job_views
    }
    return tuple(
        HostView(
            host_id=row.host_id,
            state=HostState(row.state),
            since=row.since,
            address=row.address,
            failure_domain=row.failure_domain,
            engine_address=row.engine_address,
            free_port=row.free_port,
            last_report_at=row.last_report_at,
            preempt_deadline_at=row.preempt_deadline_at,
            job=placed.get(row.host_id, ""),
            reason=row.reason,
            stale_jobs={
                job: generation
                for job, generation in workers[row.host_id].items()
                if job in newest and (newest[job][1] or generation < newest[job][0])
            },
        )
        for row in rows
    )


def _actions(connection: Connection, open_incidents: Sequence[Incident]) -> tuple[ActionView, ...]:
    newest = [number_of(incident.action_id) for incident in open_incidents if incident.action_id]
    rows = connection.execute(
        select(actions).where(or_(actions.c.ended.is_(False), actions.c.number.in_(newest))).order_by(actions.c.number)
    ).all()
    if not rows:
        return ()
    plans: dict[int, ActionPlan] = {row.number: load(row.plan, ActionPlan) for row in rows}
    positions = _positions(connection, list(plans))
    fixed = {
        row.decision: row.restore_step
        for row in connection.execute(
            select(generations.c.decision, generations.c.restore_step).where(
                generations.c.decision.in_(list(plans)), generations.c.started_at > 0.0
            )
        )
    }
    return tuple(
        ActionView(
            action_id=f"act-{row.number}",
            decision_id=f"dec-{row.number}",
            incident_id=f"inc-{row.incident}" if row.incident is not None else "",
            plan=plans[row.number],
            state=ActionState(row.state),
            phase=row.phase,
            started_at=row.started_at,
            message=row.message,
            positions=positions.get(row.number, {}),
            restore_step=fixed.get(row.number),
            restore_fixed=row.number in fixed,
        )
        for row in rows
    )


def _positions(connection: Connection, numbers: Sequence[int]) -> dict[int, dict[str, int]]:
    """Per action: str(rank) -> newest completed step that any host's answer names."""
    positions: defaultdict[int, dict[str, int]] = defaultdict(dict)
    query = select(commands.c.action, commands.c.answer).where(
        commands.c.action.in_(numbers), commands.c.answer.is_not(None)
    )
    for row in connection.execute(query):
        known = positions[row.action]
        for position in load(row.answer, CommandUpdate).result.positions:
            known[str(position.rank)] = max(position.step, known.get(str(position.rank), position.step))
    return positions
