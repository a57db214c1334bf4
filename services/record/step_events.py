"""The events of a playbook's move, and the generation that its commands carry. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.cluster import Placement
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    CheckHost,
    Command,
    CommandBody,
    StartWorkers,
    WarmUp,
)
from flyball.contracts.events import Event, EventKind
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import issued_id
from services.actuator.ports import CommandDraft, PlaybookStep
from services.record.lease_terms import Issuer
from services.rules.grant_seals import GrantSeals

STOP_PHASE = "stop"


class Position(msgspec.Struct, frozen=True):
    """The state of an action before the step."""

    action_id: str
    incident_id: str
    number: int
    plan: ActionPlan
    phase: str
    state: ActionState


def events_of(position: Position, step: PlaybookStep, now: float) -> list[Event]:
    """The events of a step. Pure."""
    events = list(step.events)
    if position.phase == STOP_PHASE != step.phase or (step.phase == STOP_PHASE and step.state is ActionState.SUCCEEDED):
        events.append(_event(position, EventKind.WORKERS_STOPPED, position.plan.generation, now))
    if step.placement is not None:
        data = {"restore_step": restore_step_of(step.placement), "world_size": step.placement.world_size}
        events.append(_event(position, EventKind.GENERATION_STARTED, step.placement.generation, now, data))
    if step.state.ended:
        events.append(ended_event(position, step.state, now))
    return events


def restore_step_of(placement: Placement) -> int | None:
    """The step to restore; None: from scratch."""
    return placement.restore.step if placement.restore is not None else None


def ended_event(position: Position, state: ActionState, now: float) -> Event:
    return _event(
        position,
        EventKind.ACTION_ENDED,
        position.plan.generation,
        now,
        {"action_id": position.action_id, "state": state.value, "kind": position.plan.kind.value},
    )


def fence_generation(plan: ActionPlan, draft: CommandDraft, granted: int | None) -> int:
    """The generation that a command carries. Only a start carries the new one. All others carry the one before it,
    running or only granted: so a stop is accepted before the start, and refused after it. `granted`: the job's newest
    generation. Pure."""
    if isinstance(draft.body, StartWorkers):
        return draft.body.placement.generation
    if plan.next is not None:
        return plan.next.generation - 1
    return max(plan.generation, granted if granted is not None else -1)


def job_and_generation(body: CommandBody) -> tuple[str, int]:
    """The job that a command is about, and the generation whose ranks its answer tells of; '' and -1: none. Pure."""
    match body:
        case WarmUp():
            return body.spec.job, -1
        case StartWorkers():
            return body.spec.job, body.placement.generation
        case CheckHost():
            return body.job, -1
    return body.job, body.generation


def command_of(
    position: Position, draft: CommandDraft, granted: int | None, issuer: Issuer, seals: GrantSeals
) -> Command:
    """The command for a host; a start is sealed. `granted`: the job's newest generation. Pure."""
    fence = Fence(issuer.epoch, fence_generation(position.plan, draft, granted))
    body = draft.body
    return Command(
        command_id=issued_id(draft.command_id, issuer.incarnation),
        action_id=position.action_id,
        host_id=draft.host_id,
        fence=fence,
        body=seals.sealed(draft.host_id, body, fence) if isinstance(body, StartWorkers) else body,
        deadline_s=draft.deadline_s,
    )


def _event(
    position: Position,
    kind: EventKind,
    generation: int,
    now: float,
    data: Mapping[str, str | int | float | bool | list[int | float | str] | None] | None = None,
) -> Event:
    return Event(
        at=now,
        kind=kind,
        job=position.plan.job,
        generation=generation,
        incident_id=position.incident_id,
        data=data or {},
    )
