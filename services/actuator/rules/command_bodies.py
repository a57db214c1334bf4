"""Builds the bodies of commands: to stop a generation, to end a job, to save in an emergency. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flyball.contracts.checkpoints import JobHistory, Tier
from flyball.contracts.decisions import (
    ActionPlan,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    EndJob,
    FlushState,
    GenerationPlan,
    SaveEmergency,
    StopWorkers,
    TakeStacks,
    UpdateState,
)
from services.actuator.ports import ActionProgress, OutboxCommand
from services.actuator.rules import step_names
from services.rules.recovery_point import newest_step

DEFAULT_FLUSH_S = 10.0  # for captured states to be committed; part of the time to stop
# These free a job's memory: the newest recovery point goes to the slow tiers first, if the job has any.
FREEING: Final = frozenset({DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB, DecisionKind.COMPLETE_JOB})
_LAST_FLUSH_TIMEOUT_S: Final = 50.0
_RELEASE_FLUSH_S = 2.0
_STACKS_PART = 0.5
_ANSWER_S = 1.0  # of the remaining time, for the answers to arrive


def stacks_body(plan: ActionPlan) -> TakeStacks:
    """See where the ranks stand; their hosts have a part of the action's time."""
    return TakeStacks(plan.job, plan.generation, _STACKS_PART * plan.deadline_s)


# --- stopping and ending ---------------------------------------------------------------------------------------------


def stopped(commands: Iterable[OutboxCommand]) -> dict[str, CommandResult]:
    """host -> what it found when it stopped, by its last answer."""
    return {
        record.command.host_id: record.update.result
        for record in commands
        if isinstance(record.command.body, StopWorkers) and record.update and record.state is UpdateState.SUCCEEDED
    }


def stop_body(plan: ActionPlan) -> StopWorkers:
    """End the workers. If the job ends, bring its newest recovery point to the slow tiers first, unless that is one
    that could not be restored."""
    ends_durably = plan.kind in FREEING and plan.spec.checkpoint.is_durable
    durable = ends_durably and not plan.lacks_ranks and not plan.keep_memory
    timeout_s = _LAST_FLUSH_TIMEOUT_S if durable else DEFAULT_FLUSH_S
    history = plan.history if plan.kind is DecisionKind.START_JOB else None
    return StopWorkers(
        plan.job, plan.generation, plan.grace_s, flush_timeout_s=timeout_s, durable=durable, history=history
    )


def list_body(plan: ActionPlan, following: GenerationPlan) -> StopWorkers:
    """List the copies of a job that the host's engine may not know. A host that is told to start it has nothing of it
    to stop."""
    history = JobHistory(plan.spec.checkpoint, following.parent_lineage, following.run)
    return StopWorkers(plan.job, plan.generation, plan.grace_s, history=history)


def end_body(progress: ActionProgress) -> EndJob:
    """Clean up, and free the memory unless it holds progress that is nowhere else."""
    plan = progress.plan
    drops_disk = plan.kind is DecisionKind.COMPLETE_JOB and plan.spec.checkpoint.disk_is_each_hosts_own
    return EndJob(plan.job, plan.generation, plan.grace_s, keep_memory=_keeps_memory(progress), drop_disk=drops_disk)


def _keeps_memory(progress: ActionProgress) -> bool:
    """Whether the slots of an ended job hold progress that no slower tier has. With the default disk tier of `flyball
    run` on one machine, that command frees them, once it has read the disk. What a job that succeeded has on default
    disks is not needed any more."""
    plan = progress.plan
    checkpoint = plan.spec.checkpoint
    if plan.keep_memory:
        return True
    if plan.kind not in FREEING or plan.history is None:
        return False
    if checkpoint.disk_is_default and plan.kind is DecisionKind.COMPLETE_JOB:
        return False
    if checkpoint.disk_is_default and not checkpoint.disk_is_each_hosts_own:
        return True
    if not checkpoint.is_durable:
        return plan.kind is DecisionKind.FAIL_JOB
    return bool(in_memory_alone(progress))


def in_memory_alone(progress: ActionProgress) -> str:
    """Why the newest step of an ending job is in memory alone, as far as its stopped hosts say; '' if it is not."""
    plan = progress.plan
    if plan.history is None:
        return ""
    checkpoint, results = plan.spec.checkpoint, stopped(progress.commands)
    where = " or ".join(filter(None, (checkpoint.disk_dir, checkpoint.persistent_dir)))
    if silent := [host for host in plan.stop_hosts if host not in results]:
        return f"{', '.join(silent[:8])} did not say whether {where} has the newest step"
    copies = [copy for result in results.values() for copy in result.copies if copy.job == plan.job]
    slow = [copy for copy in copies if copy.tier in (Tier.DISK, Tier.PERSISTENT)]
    newest, durable = (newest_step(c, plan.history.lineage, plan.spec.world_size) for c in (copies, slow))
    if newest is None or (durable is not None and durable >= newest):
        return ""
    there = "no step" if durable is None else f"step {durable}"
    return f"step {newest} could not be written to {where}, which has {there}"


# --- emergency checkpoints -------------------------------------------------------------------------------------------


def save_body(progress: ActionProgress, step: int, now: float) -> SaveEmergency:
    """Save at `step`. Half of the time is kept to bring that step to the slow tiers, or the newest recovery point if a
    rank hangs. A job that is being stopped has its workers' grace for this."""
    plan, left_s = progress.plan, progress.remaining_s(now)
    if plan.kind is DecisionKind.STOP_JOB:
        of_grace_s = max(0.1, step_names.last_name_at(progress, now) - now)
        return SaveEmergency(plan.job, plan.generation, step, deadline_s=min(of_grace_s, left_s / 2))
    kept_s = left_s / 2 if plan.spec.checkpoint.is_durable else min(_ANSWER_S, left_s / 4)
    return SaveEmergency(plan.job, plan.generation, step, deadline_s=left_s - kept_s)


def flush_body(progress: ActionProgress, now: float) -> FlushState:
    """Write what there is, in the remaining time. If the save failed, release the ranks that wait at its step."""
    plan, left_s = progress.plan, progress.remaining_s(now)
    timeout_s = left_s - min(_ANSWER_S, left_s / 2)
    return FlushState(plan.job, plan.generation, timeout_s, disarm=bool(save_failure(progress)))


def release_body(progress: ActionProgress, now: float) -> FlushState:
    """Release the ranks that wait at the step. What they saved there may reach the slow tiers meanwhile."""
    plan = progress.plan
    return FlushState(plan.job, plan.generation, min(_RELEASE_FLUSH_S, progress.remaining_s(now) / 2), disarm=True)


def save_limit_s(body: SaveEmergency, left_s: float) -> float:
    """How long the daemon tries, of the `left_s` of the action. The engine answers sooner, and some time always remains
    for the flush."""
    return body.deadline_s + min(_ANSWER_S / 2, (left_s - body.deadline_s) / 2)


def newest_saves(progress: ActionProgress) -> dict[str, OutboxCommand]:
    """host -> its newest command to save, which names the latest step."""
    saves = [r for r in progress.commands if isinstance(r.command.body, SaveEmergency)]
    newest: dict[str, OutboxCommand] = {}
    for record in saves:
        known = newest.get(record.command.host_id)
        if known is None or _step(record) >= _step(known):
            newest[record.command.host_id] = record
    return newest


def why(update: CommandUpdate) -> str:
    """Why a host could not carry out a command."""
    return update.message or update.code.replace("_", " ") or "no reason given"


def save_failure(progress: ActionProgress) -> str:
    """Why the named step was not saved; '' if it was."""
    failures: list[str] = []
    for host, record in newest_saves(progress).items():
        if record.state is UpdateState.FAILED and record.update is not None:
            failures.append(f"{host} could not save step {_step(record)}: {why(record.update)}")
        elif record.state is not UpdateState.SUCCEEDED:
            failures.append(f"{host} did not save step {_step(record)} in time")
    return "; ".join(failures)


def outcome(progress: ActionProgress) -> str:
    """Describe where each step is at the end."""
    failure = save_failure(progress)
    step = max((_step(record) for record in newest_saves(progress).values()), default=-1)
    flushes = {r.command.host_id: r for r in progress.commands if isinstance(r.command.body, FlushState)}
    found: list[str] = []
    for host, record in flushes.items():
        if record.state is UpdateState.SUCCEEDED and record.update is not None:
            tiers = record.update.result.flushed
            reached = ", ".join(
                f"{tier} step {newest}" if newest >= 0 else f"{tier} none" for tier, newest in tiers.items()
            )
            found.append(f"{host} has {reached or 'no part of it'}")
        else:
            found.append(f"{host} did not report in time what it flushed")
    where = f" ({'; '.join(found)})" if found else ""
    if failure and progress.plan.spec.checkpoint.is_durable:
        return f"{failure}. The newest recovery point was flushed instead{where}."
    if failure:
        return f"{failure}. The newest recovery point in memory counts instead."
    return f"step {step} is saved{where}"


def _step(record: OutboxCommand) -> int:
    return record.command.body.step if isinstance(record.command.body, SaveEmergency) else -1
