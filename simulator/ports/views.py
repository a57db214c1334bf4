"""Builds the policy's view from the simulated database."""

from __future__ import annotations

from collections.abc import Iterable

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import ActionState, DecisionKind, Incident, IncidentState
from flyball.contracts.reports.host_checks import CheckState
from flyball.contracts.reports.signals import RankMarks
from services.controller.round.choices.spare_choice import recent_losses
from services.controller.round.view import (
    ActionView,
    GenerationView,
    JobView,
    PastRecovery,
    RankView,
    View,
)
from services.record.answers import failed_in, sum_up
from services.record.codec import load, number_of
from services.record.host_views import host_views, placement_of
from services.record.recoveries import RECOVERING, newest_recoveries
from services.record.report_events import RankRow
from simulator.ports import standings
from simulator.ports.memory import ActionRow, JobRow, Memory
from simulator.ports.stored_copies import wanted_copies

HOUR_S = 3600.0


def load_view(memory: Memory) -> View:
    """Jobs that have not ended, or still have open work or workers; all hosts; open incidents with their actions."""
    incidents = tuple(i for _, i in sorted(memory.incidents.items()) if not i.state.closed)
    actions = tuple(_action(memory, row) for row in _wanted(memory, incidents))
    named = {incident.job for incident in incidents} | {action.plan.job for action in actions}
    told = standings.told(memory)
    named |= {held.spec.job for one in told for held in one.standing.jobs}
    named.update(job for one in told for job in one.ended)
    rows = [memory.hosts[name] for name in sorted(memory.hosts)]
    named.update(*(row.workers for row in rows))
    jobs = tuple(
        _job(memory, row)
        for name, row in sorted(memory.jobs.items(), key=lambda item: (item[1].submitted_at, item[0]))
        if not row.state.ended or name in named
    )
    persistent = [
        copy
        for job in jobs
        if job.generation is not None
        for copy in wanted_copies(memory, job.spec, job.generation.lineage)
    ]
    losses = recent_losses(memory.incidents.values(), memory.clock.wall_s())
    conditions = {host: tuple(one for _, one in sorted(of.items())) for host, of in memory.conditions.items() if of}
    return View(
        jobs=jobs,
        hosts=host_views(
            rows,
            *placement_of(jobs),
            memory.drains.copy(),
            losses=losses,
            conditions=conditions,
            checks=memory.checks.copy(),
        ),
        incidents=incidents,
        actions=actions,
        copies=(*(copy for row in rows for copy in row.copies), *persistent),
        next_incident=max(memory.incidents, default=0) + 1,
        next_decision=max((memory.decision_floor, *memory.decisions)) + 1,
        cluster=memory.cluster_id,
        standings=told,
        asked=tuple(sorted(host for host, row in memory.standings.items() if row.standing is None)),
        epoch=memory.held.epoch,
    )


def _job(memory: Memory, row: JobRow) -> JobView:
    return JobView(
        spec=row.spec,
        state=row.state,
        submitted_at=row.submitted_at,
        stop_requested=row.stop_requested,
        generation=_generation(memory, row),
        failures=row.failures,
        newest_step=row.newest_step,
        message=row.message,
        ended_at=row.ended_at,
        recoveries=_recoveries(memory, row.spec.job),
        acted_at=_acted_at(memory, row.spec.job),
    )


def _acted_at(memory: Memory, job: str) -> tuple[float, ...]:
    since = memory.clock.wall_s() - HOUR_S
    return tuple(
        row.started_at
        for row in reversed(memory.actions.values())  # newest first
        if row.started_at > since
        and row.plan.job == job
        and row.incident_id
        and row.plan.kind not in (DecisionKind.TAKE_STACKS, DecisionKind.CHECK_HOSTS)
    )


def _recoveries(memory: Memory, job: str) -> tuple[PastRecovery, ...]:
    """As the database has them."""
    return newest_recoveries(
        (decision.kind, decision.at, incident)
        for decision, _ in reversed(memory.decisions.values())  # newest first
        if decision.kind in RECOVERING
        and decision.job == job
        and decision.incident_id
        and (incident := memory.incidents.get(number_of(decision.incident_id))) is not None
        and incident.state is IncidentState.RESOLVED
    )


def _first_step_at(rank: RankRow | None) -> float:
    marks: RankMarks | None = load(rank.marks, RankMarks) if rank is not None and rank.marks else None
    return marks.first_step_at if marks is not None else 0.0


def _generation(memory: Memory, job: JobRow) -> GenerationView | None:
    key = (job.spec.job, job.generation)
    row = memory.generations.get(key)
    if row is None:
        return None
    exits = {rank: memory.exits.get((*key, rank)) for rank in memory.ranks[key]}
    return GenerationView(
        generation=row.plan.generation,
        parent=row.plan.parent,
        lineage=row.plan.parent_lineage if row.lineage is None else row.lineage,
        hosts=row.plan.hosts,
        peers=row.plan.peers,
        started_at=row.started_at,
        restore_step=row.restore_step,
        restart_count=row.plan.restart_count,
        restarts_used=row.plan.restarts_used,
        furthest_step=row.plan.furthest_step,
        parent_lineage=row.plan.parent_lineage,
        ran_before_s=row.plan.ran_before_s,
        too_few_hosts=row.plan.too_few_hosts,
        step_s=row.plan.step_s,
        first_step_at=_first_step_at(memory.ranks[key].get(0)),
        ranks=tuple(
            RankView(
                rank=number,
                host_id=rank.host_id,
                step=rank.step,
                phase=Phase(rank.phase),
                reported_at=rank.reported_at,
                exited=ended.body if (ended := exits[number]) is not None else None,
                exited_at=ended.at if ended is not None else 0.0,
                is_gone=rank.is_gone,
            )
            for number, rank in sorted(memory.ranks[key].items())
        ),
    )


def _wanted(memory: Memory, incidents: Iterable[Incident]) -> list[ActionRow]:
    newest = {number_of(incident.action_id) for incident in incidents if incident.action_id}
    newest |= {number_of(c.action_id) for c in memory.checks.values() if c.state is CheckState.RUNNING}
    running = [(name, job.generation) for name, job in memory.jobs.items() if not job.state.ended]
    granted = {memory.generations[key].decision for key in running if key in memory.generations}
    return [
        row
        for number, row in memory.actions.items()
        if number in newest
        or not row.state.ended
        or (number in granted and row.phase == "start" and row.state in (ActionState.FAILED, ActionState.TIMED_OUT))
    ]


def _action(memory: Memory, row: ActionRow) -> ActionView:
    answers = sum_up(command.update for command in row.commands if command.update is not None)
    fixed = next((g for g in memory.generations.values() if g.decision == row.number and g.started_at > 0.0), None)
    return ActionView(
        action_id=f"act-{row.number}",
        decision_id=f"dec-{row.number}",
        incident_id=row.incident_id,
        plan=row.plan,
        state=row.state,
        phase=row.phase,
        started_at=row.started_at,
        message=row.message,
        positions=answers.positions,
        stands=answers.stands,
        checks=answers.checks,
        unmeasured=answers.unmeasured,
        failed=failed_in(answers, row.phase),
        restore_step=fixed.restore_step if fixed is not None else None,
        restore_fixed=fixed is not None,
    )
