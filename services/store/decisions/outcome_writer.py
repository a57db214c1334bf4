"""Stores the changes of a policy round. The events are derived from the rows, so that the two agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import ActionPlan, ActionState, Decision, GenerationPlan, Incident
from flyball.contracts.events import Event
from services.actuator.ports import PlaybookStep
from services.controller.round.view import HostChange, JobChange, ReportedStanding
from services.record import outcome_events, step_events
from services.record.codec import dump, load, number_of
from services.record.lease_terms import Issuer
from services.record.step_events import Position
from services.rules.grant_seals import GrantSeals
from services.store.actions import step_writer
from services.store.actions.action_cache import incident_id
from services.store.decisions import drain_store
from services.store.decisions.host_cache import UNREADABLE_STATE
from services.store.sql.rows import new_version
from services.store.sql.set_aside import readable
from services.store.sql.tables import (
    action_changes,
    actions,
    decisions,
    generations,
    hosts,
    incident_changes,
    incidents,
    job_failures,
    jobs,
    standings,
)


def store_hosts(connection: Connection, changes: Sequence[HostChange], now: float) -> list[Event]:
    """Change the state of known hosts."""
    events = []
    for change in sorted(changes, key=lambda change: change.host_id):
        mine = hosts.c.host_id == change.host_id
        before = connection.scalar(select(hosts.c.state).where(mine).with_for_update())
        if before is None:
            continue
        values: dict[str, Any] = {"state": change.state.value, "reason": change.reason, "version": new_version()}
        if before != change.state.value:
            values["since"] = now
        if change.preempt_deadline_at is not None:
            values["preempt_deadline_at"] = change.preempt_deadline_at
        connection.execute(update(hosts).where(mine).values(values))
        drain_store.answer(connection, change)
        state = readable("hosts", change.host_id, HostState, before) or UNREADABLE_STATE
        events += outcome_events.of_host(change, state, now)
    return events


def store_incidents(connection: Connection, changed: Sequence[Incident], decided: Sequence[Decision]) -> list[Event]:
    """Insert or replace incidents. `decided_at` is the time of the first decision that acts on an incident."""
    acted = {decision.incident_id: decision.at for decision in reversed(decided) if decision.action is not None}
    numbers = [number_of(incident.incident_id) for incident in changed]
    known = {row.number: row for row in connection.execute(select(incidents).where(incidents.c.number.in_(numbers)))}
    events = []
    for number, incident in zip(numbers, changed, strict=True):
        stored = known[number].document if number in known else None
        before = readable("incidents", incident.incident_id, load, stored, Incident) if stored else None
        values = {
            "job": incident.job,
            "state": incident.state.value,
            "closed": incident.state.closed,
            "host_id": incident.host_id,
            "cause": incident.cause,
            "opened_at": incident.opened_at,
            "document": dump(incident),
        }
        if stored is None:
            connection.execute(insert(incidents).values(number=number, decided_at=0.0, **values))
        else:
            connection.execute(update(incidents).where(incidents.c.number == number).values(values))
        if outcome_events.is_news(before, incident):
            connection.execute(
                insert(incident_changes).values(
                    incident=number,
                    at=incident.since,
                    state=incident.state.value,
                    cause=incident.cause,
                    message=incident.message,
                )
            )
        events += outcome_events.of_incident(before, incident)
    for name, at in acted.items():
        if name:
            connection.execute(
                update(incidents)
                .where(incidents.c.number == number_of(name), incidents.c.decided_at == 0.0)
                .values(decided_at=at)
            )
    return events


def store_decisions(connection: Connection, decided: Sequence[Decision], epoch: int) -> list[Event]:
    """Insert decisions and the generations that they grant."""
    events = []
    for decision in decided:
        insert_decision(connection, decision, epoch)
        if decision.action is not None and decision.action.next is not None:
            _grant(connection, decision, decision.action.next, decision.action.spec.nnodes)
        events += outcome_events.of_decision(decision)
    return events


def insert_decision(connection: Connection, decision: Decision, epoch: int) -> None:
    """Insert the row of a decision."""
    connection.execute(
        insert(decisions).values(
            number=number_of(decision.decision_id),
            incident=number_of(decision.incident_id) if decision.incident_id else None,
            job=decision.job,
            kind=decision.kind.value,
            at=decision.at,
            epoch=epoch,
            document=dump(decision),
        )
    )


def store_actions(
    connection: Connection,
    decided: Sequence[Decision],
    first_steps: Mapping[str, PlaybookStep],
    *,
    issuer: Issuer,
    seals: GrantSeals,
    now: float,
) -> list[Event]:
    """Insert the actions of decisions, each with the first step of its playbook."""
    events = []
    for decision in decided:
        if decision.action is None:
            continue
        number = number_of(decision.decision_id)
        position = Position(
            action_id=f"act-{number}",
            incident_id=decision.incident_id,
            number=number,
            plan=decision.action,
            phase="",
            state=ActionState.QUEUED,
        )
        connection.execute(
            insert(actions).values(
                number=number,
                incident=number_of(decision.incident_id) if decision.incident_id else None,
                job=decision.job,
                plan=dump(decision.action),
                state=ActionState.QUEUED.value,
                ended=False,
                phase="",
                attempt=1,
                version=0,
                message="",
                started_at=decision.at,
                ended_at=0.0,
            )
        )
        connection.execute(
            insert(action_changes).values(
                action=number, at=decision.at, phase="", state=ActionState.QUEUED.value, message=""
            )
        )
        step = first_steps.get(position.action_id)
        if step is not None:
            connection.execute(
                update(actions).where(actions.c.number == number).values(step_writer.values_of(step, now))
            )
            events.extend(step_writer.store(connection, position, step, issuer=issuer, seals=seals, now=now))
    return events


def supersede(connection: Connection, action_ids: Sequence[str], now: float) -> list[Event]:
    """End actions that a newer decision supersedes. Those that ended meanwhile stay unchanged."""
    events = []
    for action_id in action_ids:
        number = number_of(action_id)
        mine = actions.c.number == number
        row = connection.execute(select(actions).where(mine, ~actions.c.ended).with_for_update()).first()
        if row is None:
            continue
        state = ActionState.SUPERSEDED
        message = "superseded by a newer decision"
        connection.execute(
            update(actions)
            .where(mine)
            .values(state=state.value, ended=True, ended_at=now, version=actions.c.version + 1, message=message)
        )
        connection.execute(
            insert(action_changes).values(action=number, at=now, phase=row.phase, state=state.value, message=message)
        )
        step_writer.close_commands(connection, number)
        plan = readable("actions", action_id, load, row.plan, ActionPlan)
        if plan is None:
            events.append(step_writer.ended_unread(connection, row, state, now))
            continue
        position = Position(action_id, incident_id(row.incident), number, plan, row.phase, state)
        events.append(step_events.ended_event(position, state, now))
    return events


def forget_standings(connection: Connection, withdrawn: Iterable[ReportedStanding]) -> None:
    """Forget what these hosts said, unless they said it again meanwhile."""
    for one in withdrawn:
        same = (standings.c.host_id == one.standing.host_id, standings.c.told_at == one.told_at)
        connection.execute(delete(standings).where(*same))


def store_jobs(connection: Connection, changes: Sequence[JobChange], now: float) -> list[Event]:
    """Change the state of jobs, and record how their generations failed."""
    events = []
    for change in changes:
        mine = jobs.c.job == change.job
        before = connection.scalar(select(jobs.c.state).where(mine).with_for_update())
        known = readable("jobs", change.job, JobState, before, job=change.job) if before is not None else None
        if known is None:
            continue
        values: dict[str, Any] = {"state": change.state.value, "message": change.message}
        if change.state.ended and not known.ended:
            values["ended_at"] = now
        events += outcome_events.of_job(change, known, now)
        connection.execute(update(jobs).where(mine).values(values))
        if change.failure is not None:
            failure = change.failure
            connection.execute(
                insert(job_failures).values(
                    job=change.job,
                    generation=failure.generation,
                    cause=failure.cause,
                    error_kind=failure.error_kind,
                    error_message=failure.error_message,
                    step=failure.step,
                    host_id=failure.host_id,
                )
            )
    return events


def _grant(connection: Connection, decision: Decision, plan: GenerationPlan, nnodes: int) -> None:
    """Insert a generation. The job's specification follows it to another number of hosts."""
    connection.execute(
        insert(generations).values(
            job=plan.job,
            generation=plan.generation,
            decision=number_of(decision.decision_id),
            plan=dump(plan),
            granted_at=decision.at,
            started_at=0.0,
            restore_step=None,
            lineage=None,
            placement=None,
        )
    )
    mine = (jobs.c.job == plan.job, jobs.c.generation < plan.generation)
    values: dict[str, Any] = {"generation": plan.generation}
    stored = connection.scalar(select(jobs.c.spec).where(*mine))
    spec = readable("jobs", plan.job, load, stored, JobSpec, job=plan.job) if stored is not None else None
    if spec is not None and spec.nnodes != nnodes:
        values["spec"] = dump(spec.on(nnodes))
    connection.execute(update(jobs).where(*mine).values(values))
