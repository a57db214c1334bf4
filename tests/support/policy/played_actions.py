"""An action of the playbook, moved by hand: its hosts answer what a test says."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    GenerationPlan,
    UpdateState,
)
from flyball.contracts.identity import Fence
from services.actuator.ports import ActionProgress, OutboxCommand, PlaybookStep

NOW = 1000.0
SPEC = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1)
NEXT = GenerationPlan(
    job="job",
    generation=3,
    parent=2,
    hosts=(HostRanks("a", "10.0.0.1", "a:old", (0,)), HostRanks("c", "10.0.0.3", "c:7", (1,))),
    peers={"a": ("c",), "c": ("a",)},
    parent_lineage=(LineageEntry(2),),
    restart_count=1,
    master_port=29_500,
    run="20251120-104300-123",
)
MIGRATE = ActionPlan(
    DecisionKind.MIGRATE_TO_SPARE,
    "job",
    SPEC,
    generation=2,
    stop_hosts=("a",),
    unreachable_hosts=("b",),
    next=NEXT,
    deadline_s=60.0,
    warm_hosts=("c",),
)


def begun(plan: ActionPlan) -> ActionProgress:
    return ActionProgress(
        action_id="act-9",
        decision_id="dec-9",
        incident_id="inc-1",
        plan=plan,
        state=ActionState.QUEUED,
        phase="",
        version=0,
        started_at=NOW,
        commands=(),
        engine_addresses={"a": "a:7", "b": "b:7", "c": "c:7"},
    )


def apply(progress: ActionProgress, step: PlaybookStep, now: float = NOW) -> ActionProgress:
    fresh = [
        OutboxCommand(
            Command(d.command_id, "act-9", d.host_id, Fence(1, 2), d.body, d.deadline_s), step.phase, now, None
        )
        for d in step.commands
    ]
    return msgspec.structs.replace(
        progress, phase=step.phase, state=step.state, attempt=step.attempt, commands=(*progress.commands, *fresh)
    )


def answer(
    progress: ActionProgress,
    state: UpdateState,
    hosts: Mapping[str, CommandResult],
    *,
    code: str = "",
    message: str = "",
) -> ActionProgress:
    """Let hosts answer their newest command of the present phase."""
    records = list(progress.commands)
    for host, result in hosts.items():
        at = max(i for i, r in enumerate(records) if r.command.host_id == host and r.phase == progress.phase)
        command = records[at].command
        update = CommandUpdate(command.command_id, host, "i1", state, NOW, message=message, code=code, result=result)
        records[at] = msgspec.structs.replace(records[at], update=update)
    return msgspec.structs.replace(progress, commands=tuple(records))


def copy(step: int, rank: int, host: str, tier: Tier = Tier.MEMORY) -> ShardCopy:
    return ShardCopy("job", 2, step, rank, tier, host, 10, "d")
