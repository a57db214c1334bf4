"""Stores one step of a playbook in the simulated database: the first with its decision, the others later."""

from __future__ import annotations

from flyball.contracts.decisions import Command
from flyball.contracts.events import Event
from services.actuator.ports import CommandDraft, PlaybookStep
from services.record import step_events
from services.record.lease_terms import Issuer
from services.record.step_events import Position
from services.rules.grant_seals import GrantSeals
from simulator.ports.memory import ActionRow, CommandRow, Memory, StateChange

SEALS = GrantSeals("a simulated cluster")


def position_of(row: ActionRow) -> Position:
    """The action's position."""
    return Position(
        action_id=f"act-{row.number}",
        incident_id=row.incident_id,
        number=row.number,
        plan=row.plan,
        phase=row.phase,
        state=row.state,
    )


def store(memory: Memory, row: ActionRow, step: PlaybookStep, now: float) -> list[Event]:
    """Advance the action; returns the events to log."""
    before = position_of(row)
    if step.message or (step.phase, step.state) != (row.phase, row.state):
        memory.action_changes.append(StateChange(row.number, now, step.state, step.phase))
    row.phase, row.state, row.attempt, row.message = step.phase, step.state, step.attempt, step.message
    row.version += 1
    row.ended_at = now if step.state.ended else 0.0
    _issue(memory, row, step, now)
    if step.job_message and row.plan.job in memory.jobs:
        memory.jobs[row.plan.job].message = step.job_message
    if step.placement is not None:
        generation = memory.generations[step.placement.job, step.placement.generation]
        generation.started_at = now
        generation.restore_step = step_events.restore_step_of(step.placement)
        generation.lineage = step.placement.lineage
    if step.state.ended:
        close_commands(memory, row)
    return step_events.events_of(before, step, now)


def close_commands(memory: Memory, row: ActionRow) -> None:
    """Stop handing out this action's commands."""
    for command in row.commands:
        memory.close_command(command)


def _issue(memory: Memory, row: ActionRow, step: PlaybookStep, now: float) -> None:
    asked = {draft.host_id for draft in step.commands}
    for command in row.commands:
        if command.phase == step.phase and command.command.host_id in asked:
            memory.close_command(command)
    for draft in step.commands:
        command = CommandRow(_command(memory, row, draft), row.number, step.phase, now)
        row.commands.append(command)
        memory.commands[command.command.command_id] = command
        memory.open_commands[draft.host_id][command.command.command_id] = command


def _command(memory: Memory, row: ActionRow, draft: CommandDraft) -> Command:
    job = memory.jobs.get(row.plan.job)
    issuer = Issuer(memory.held.epoch, memory.incarnation)
    return step_events.command_of(position_of(row), draft, job.generation if job is not None else None, issuer, SEALS)
