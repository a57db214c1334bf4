"""How a generation is stopped and a job is ended, so that no progress goes with its memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flyball.contracts.checkpoints import Tier
from flyball.contracts.decisions import ActionPlan, CommandResult, DecisionKind, EndJob, StopWorkers, UpdateState
from services.actuator.moves import DEFAULT_FLUSH_S
from services.actuator.ports import ActionProgress, OutboxCommand
from services.rules.recovery_point import newest_step

# What these end is freed: the newest recovery point goes to the slow tiers first, where the job has any.
FREEING: Final = frozenset({DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB, DecisionKind.COMPLETE_JOB})
_LAST_FLUSH_TIMEOUT_S: Final = 50.0


def stopped(commands: Iterable[OutboxCommand]) -> dict[str, CommandResult]:
    """What the hosts that stopped found, by host; of several answers the last."""
    return {
        record.command.host_id: record.update.result
        for record in commands
        if isinstance(record.command.body, StopWorkers) and record.update and record.state is UpdateState.SUCCEEDED
    }


def stop_body(plan: ActionPlan) -> StopWorkers:
    """End the workers; of a job that ends, the newest recovery point goes to the slow tiers first."""
    durable = plan.kind in FREEING and plan.spec.checkpoint.is_durable and not plan.unreachable_hosts
    timeout_s = _LAST_FLUSH_TIMEOUT_S if durable else DEFAULT_FLUSH_S
    history = plan.history if plan.kind is DecisionKind.START_JOB else None
    return StopWorkers(
        plan.job, plan.generation, plan.grace_s, flush_timeout_s=timeout_s, durable=durable, history=history
    )


def end_body(progress: ActionProgress) -> EndJob:
    """Tidy up, and free the memory if nothing is lost by it."""
    plan = progress.plan
    is_done_with = plan.kind is DecisionKind.COMPLETE_JOB and plan.spec.checkpoint.disk_is_each_hosts_own
    return EndJob(plan.job, plan.generation, plan.grace_s, keep_memory=_keeps_memory(progress), drop_disk=is_done_with)


def _keeps_memory(progress: ActionProgress) -> bool:
    """Whether the slots of a job that did not succeed hold what nothing slower has. Where the disk tier is the default
    of `flyball run` on one machine, that frees them, once it has read the disk."""
    plan = progress.plan
    checkpoint = plan.spec.checkpoint
    if plan.kind not in (DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB) or plan.history is None:
        return False
    if checkpoint.disk_is_default and not checkpoint.disk_is_each_hosts_own:
        return True
    if not checkpoint.is_durable:
        return plan.kind is DecisionKind.FAIL_JOB
    results = stopped(progress.commands)
    if not results.keys() >= set(plan.stop_hosts):
        return True
    copies = [copy for result in results.values() for copy in result.copies if copy.job == plan.job]
    slow = [copy for copy in copies if copy.tier in (Tier.DISK, Tier.PERSISTENT)]
    newest, durable = (newest_step(c, plan.history.lineage, plan.spec.world_size) for c in (copies, slow))
    return newest is not None and (durable is None or durable < newest)
