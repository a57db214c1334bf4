"""An `ActionStore` in memory."""

from __future__ import annotations

from collections.abc import Sequence

from flyball.contracts.decisions import Command, CommandUpdate, UpdateState
from services.actuator.ports import ActionProgress, OutboxCommand, PlaybookStep
from services.record.answers import ACKNOWLEDGED, ANSWERED
from services.record.codec import number_of
from simulator.ports import steps
from simulator.ports.memory import ActionRow, Memory
from simulator.ports.stored_copies import wanted_copies


class MemoryActionStore:
    """Any number of actuators may share the memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def open_actions(self) -> list[ActionProgress]:
        """Every action that has not ended, with all its commands, oldest first."""
        memory = self._memory
        with memory.transaction():
            rows = [row for row in memory.actions.values() if not row.state.ended]
            if not rows:
                return []
            addresses = {h.host_id: h.engine_address for h in memory.hosts.values() if h.engine_address}
            return [self._progress(row, addresses) for row in rows]

    def _progress(self, row: ActionRow, addresses: dict[str, str]) -> ActionProgress:
        plan = row.plan
        stored = wanted_copies(self._memory, plan.spec, plan.next.parent_lineage) if plan.next is not None else ()
        return ActionProgress(
            action_id=f"act-{row.number}",
            decision_id=f"dec-{row.number}",
            incident_id=row.incident_id,
            plan=row.plan,
            state=row.state,
            phase=row.phase,
            version=row.version,
            started_at=row.started_at,
            commands=tuple(OutboxCommand(c.command, c.phase, c.created_at, c.update) for c in row.commands),
            persistent_copies=stored,
            engine_addresses=addresses,
            attempt=row.attempt,
        )

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        """Store a step; False if the action ended or advanced since `progress` was read."""
        memory = self._memory
        with memory.transaction():
            row = memory.actions[number_of(progress.action_id)]
            if row.version != progress.version or row.state.ended:
                return False
            memory.changed(steps.store(memory, row, step, now))
            return True

    def daemons_of(self, host_ids: Sequence[str]) -> dict[str, str]:
        """Host -> incarnation of its newest stored report; without hosts that never reported."""
        with self._memory.transaction():
            hosts = self._memory.hosts
            return {host_id: hosts[host_id].incarnation for host_id in host_ids if host_id in hosts}

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        """The host's commands of open actions that lack a final reply, oldest first."""
        with self._memory.transaction():
            rows = list(self._memory.open_commands[host_id].values())
            for row in rows:
                row.dispatched_at = row.dispatched_at or now
            return [row.command for row in rows]

    def record(self, update: CommandUpdate) -> None:
        """Store a host's reply. The first final one stands; unknown commands are ignored."""
        memory = self._memory
        progress = ACKNOWLEDGED if update.state is UpdateState.ACKNOWLEDGED else ANSWERED
        with memory.transaction():
            row = memory.commands.get(update.command_id)
            if row is None or row.command.host_id != update.host_id or row.progress >= progress:
                return
            row.progress, row.update = progress, update
            if progress == ANSWERED:
                memory.close_command(row)
            memory.changed()
