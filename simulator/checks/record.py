"""The history in a database, in one form for SQL and the simulator's memory. Pure."""

from __future__ import annotations

import msgspec

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    Decision,
    GenerationPlan,
    Incident,
    IncidentState,
    UpdateState,
)


class IncidentRecord(msgspec.Struct, frozen=True):
    incident: Incident
    states: tuple[tuple[int, IncidentState], ...]  # each with its place among all changes of incidents


class DecisionRecord(msgspec.Struct, frozen=True):
    number: int
    epoch: int
    decision: Decision


class ActionRecord(msgspec.Struct, frozen=True):
    number: int
    plan: ActionPlan
    incident_id: str
    state: ActionState
    began: int  # place among all changes of actions
    ended: int  # likewise; -1: it has not ended


class CommandRecord(msgspec.Struct, frozen=True):
    command: Command
    action: int
    phase: str
    state: UpdateState | None


class GenerationRecord(msgspec.Struct, frozen=True):
    plan: GenerationPlan
    decision: int
    started_at: float
    restore_step: int | None
    lineage: Lineage | None


class Record(msgspec.Struct, frozen=True):
    epoch: int
    incidents: tuple[IncidentRecord, ...]  # by number, like all that follow
    decisions: tuple[DecisionRecord, ...]
    actions: tuple[ActionRecord, ...]
    commands: tuple[CommandRecord, ...]
    generations: tuple[GenerationRecord, ...]
