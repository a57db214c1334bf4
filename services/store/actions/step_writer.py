"""Stores one step of a playbook: the first together with its decision, and every later one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select, update

from flyball.contracts.cluster import Placement
from flyball.contracts.decisions import ActionState, Command
from flyball.contracts.events import Event, EventKind
from services.actuator.ports import PlaybookStep
from services.record.codec import dump
from services.record.lease_terms import Issuer
from services.record.step_events import (
    Position,
    command_of,
    events_of,
    restore_step_of,
)
from services.rules.grant_seals import GrantSeals
from services.store.sql import events
from services.store.sql.tables import action_changes, actions, commands, decisions, generations, jobs


def store(
    connection: Connection, position: Position, step: PlaybookStep, *, issuer: Issuer, seals: GrantSeals, now: float
) -> list[Event]:
    """Write a step of an action whose row the caller has locked and updated (`values_of`). Returns its events."""
    if step.message or (step.phase, step.state) != (position.phase, position.state):
        connection.execute(
            insert(action_changes).values(
                action=position.number, at=now, phase=step.phase, state=step.state.value, message=step.message
            )
        )
    if step.commands:
        granted = connection.scalar(select(jobs.c.generation).where(jobs.c.job == position.plan.job))
        rows = [
            _row(position.number, step.phase, command_of(position, draft, granted, issuer, seals), now)
            for draft in step.commands
        ]
        _withdraw(connection, position.number, step)
        connection.execute(insert(commands), rows)
    if step.job_message:
        connection.execute(update(jobs).where(jobs.c.job == position.plan.job).values(message=step.job_message))
    if step.placement is not None:
        _start_generation(connection, step.placement, now)
    if step.state.ended:
        close_commands(connection, position.number)
    return events_of(position, step, now)


def values_of(step: PlaybookStep, now: float) -> dict[str, Any]:
    """Return the action's columns after a step."""
    return {
        "phase": step.phase,
        "state": step.state.value,
        "ended": step.state.ended,
        "attempt": step.attempt,
        "message": step.message,
        "version": actions.c.version + 1,
        "ended_at": now if step.state.ended else 0.0,
    }


def fail_unread(connection: Connection, *, number: int, message: str, now: float) -> None:
    """Fail an action of which something cannot be decoded, unless it ended meanwhile."""
    mine = actions.c.number == number
    row = connection.execute(select(*HEAD).where(mine, ~actions.c.ended).with_for_update()).first()
    if row is None:
        return
    state = ActionState.FAILED
    step = PlaybookStep(row.phase, state, message=message, attempt=row.attempt)
    connection.execute(update(actions).where(mine).values(values_of(step, now)))
    connection.execute(
        insert(action_changes).values(action=number, at=now, phase=row.phase, state=state.value, message=message)
    )
    close_commands(connection, number)
    events.append(connection, [ended_unread(connection, row, state, now)])


# The columns that describe an action without its plan.
HEAD = (actions.c.number, actions.c.incident, actions.c.job, actions.c.phase, actions.c.attempt)


def ended_unread(
    connection: Connection,
    row: Any,  # noqa: ANN401 - a row of these or more columns
    state: ActionState,
    now: float,
) -> Event:
    """Return the event of an action's end whose plan cannot be decoded. `row`: at least `HEAD`."""
    kind = connection.scalar(select(decisions.c.kind).where(decisions.c.number == row.number)) or ""
    generation = connection.scalar(select(jobs.c.generation).where(jobs.c.job == row.job))
    return Event(
        at=now,
        kind=EventKind.ACTION_ENDED,
        job=row.job,
        generation=-1 if generation is None else generation,
        incident_id="" if row.incident is None else f"inc-{row.incident}",
        data={"action_id": f"act-{row.number}", "state": state.value, "kind": kind},
    )


def close_commands(connection: Connection, number: int) -> None:
    """Hand out no more commands of this action."""
    connection.execute(update(commands).where(commands.c.action == number, commands.c.is_open).values(is_open=False))


def _row(action: int, phase: str, command: Command, now: float) -> dict[str, Any]:
    return {
        "command_id": command.command_id,
        "action": action,
        "phase": phase,
        "host_id": command.host_id,
        "document": dump(command),
        "created_at": now,
        "dispatched_at": 0.0,
        "is_open": True,
        "progress": 0,
        "answered_at": 0.0,
        "answer": None,
    }


def _withdraw(connection: Connection, number: int, step: PlaybookStep) -> None:
    """Stop handing out earlier commands of this phase to the same hosts. Their answers still count."""
    asked_again = sorted({draft.host_id for draft in step.commands})
    connection.execute(
        update(commands)
        .where(commands.c.action == number, commands.c.phase == step.phase, commands.c.host_id.in_(asked_again))
        .values(is_open=False)
    )


def _start_generation(connection: Connection, placement: Placement, now: float) -> None:
    connection.execute(
        update(generations)
        .where(generations.c.job == placement.job, generations.c.generation == placement.generation)
        .values(
            started_at=now,
            restore_step=restore_step_of(placement),
            lineage=dump(placement.lineage),
            placement=dump(placement),
        )
    )
