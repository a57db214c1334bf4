"""Stores one step of a playbook: the first together with its decision, and every later one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, insert, select, update

from flyball.contracts.cluster import Placement
from flyball.contracts.decisions import Command
from flyball.contracts.events import Event
from services.actuator.ports import PlaybookStep
from services.record.codec import dump
from services.record.lease_terms import Issuer
from services.record.step_events import (
    Position,
    command_of,
    events_of,
    restore_step_of,
)
from services.store.sql.tables import action_changes, actions, commands, generations, jobs


def store(connection: Connection, position: Position, step: PlaybookStep, *, issuer: Issuer, now: float) -> list[Event]:
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
            _row(position.number, step.phase, command_of(position, draft, granted, issuer), now)
            for draft in step.commands
        ]
        _withdraw(connection, position.number, step)
        connection.execute(insert(commands), rows)
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
