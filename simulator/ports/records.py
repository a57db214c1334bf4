"""What the simulated database says happened."""

from __future__ import annotations

from flyball.contracts.decisions import ActionState, IncidentState
from simulator.checks.record import (
    ActionRecord,
    CommandRecord,
    DecisionRecord,
    GenerationRecord,
    IncidentRecord,
    Record,
)
from simulator.ports.memory import Memory


def of_memory(memory: Memory) -> Record:
    """What the simulated database says."""
    states: dict[int, list[tuple[int, IncidentState]]] = {}
    for place, change in enumerate(memory.incident_changes, 1):
        states.setdefault(change.number, []).append((place, IncidentState(change.state)))
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    for place, change in enumerate(memory.action_changes, 1):
        began.setdefault(change.number, place)
        if ActionState(change.state).ended:
            ended.setdefault(change.number, place)
    return Record(
        epoch=memory.held.epoch,
        incidents=tuple(IncidentRecord(i, tuple(states.get(n, ()))) for n, i in sorted(memory.incidents.items())),
        decisions=tuple(DecisionRecord(n, epoch, d) for n, (d, epoch) in sorted(memory.decisions.items())),
        actions=tuple(
            ActionRecord(n, row.plan, row.incident_id, row.state, began[n], ended.get(n, -1))
            for n, row in sorted(memory.actions.items())
        ),
        commands=tuple(
            CommandRecord(row.command, row.action, row.phase, row.update.state if row.update is not None else None)
            for row in memory.commands.values()
        ),
        generations=tuple(
            GenerationRecord(row.plan, row.decision, row.started_at, row.restore_step, row.lineage)
            for _, row in sorted(memory.generations.items())
        ),
    )
