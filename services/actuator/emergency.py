"""The words and times of an emergency checkpoint: what its commands say, and what came of it. Pure."""

from __future__ import annotations

from flyball.contracts.decisions import DecisionKind, FlushState, SaveEmergency, UpdateState
from services.actuator.ports import ActionProgress, OutboxCommand

_RELEASE_FLUSH_S = 2.0
_ANSWER_S = 1.0  # of what is left, for the answers to be heard


def save_body(progress: ActionProgress, step: int, now: float) -> SaveEmergency:
    """Save at `step`; half of the time is kept for bringing it to the slow tiers, or the newest recovery point instead
    if a rank hangs. A job that is stopped has the time for it that its workers are given to end."""
    plan, left_s = progress.plan, progress.remaining_s(now)
    if plan.kind is DecisionKind.STOP_JOB:
        return SaveEmergency(plan.job, plan.generation, step, deadline_s=min(plan.grace_s, left_s / 2))
    kept_s = left_s / 2 if plan.spec.checkpoint.is_durable else min(_ANSWER_S, left_s / 4)
    return SaveEmergency(plan.job, plan.generation, step, deadline_s=left_s - kept_s)


def flush_body(progress: ActionProgress, now: float) -> FlushState:
    """Write what there is, in the time that is left. If the save failed, ranks that wait at its step are let go."""
    plan, left_s = progress.plan, progress.remaining_s(now)
    timeout_s = left_s - min(_ANSWER_S, left_s / 2)
    return FlushState(plan.job, plan.generation, timeout_s, disarm=bool(save_failure(progress)))


def release_body(progress: ActionProgress, now: float) -> FlushState:
    """Take the step back: ranks that wait at it train on. What they saved there may reach the slow tiers meanwhile."""
    plan = progress.plan
    return FlushState(plan.job, plan.generation, min(_RELEASE_FLUSH_S, progress.remaining_s(now) / 2), disarm=True)


def save_limit_s(body: SaveEmergency, left_s: float) -> float:
    """When the daemon gives the command up, of the `left_s` that the action has; the engine answers before, and some of
    it is kept for the flush in any case."""
    return body.deadline_s + min(_ANSWER_S / 2, (left_s - body.deadline_s) / 2)


def newest_saves(progress: ActionProgress) -> dict[str, OutboxCommand]:
    """By host the newest command to save, of the step that was named last."""
    saves = [r for r in progress.commands if isinstance(r.command.body, SaveEmergency)]
    newest: dict[str, OutboxCommand] = {}
    for record in saves:
        known = newest.get(record.command.host_id)
        if known is None or _step(record) >= _step(known):
            newest[record.command.host_id] = record
    return newest


def save_failure(progress: ActionProgress) -> str:
    """Why the named step is not there, '' if it is."""
    said: list[str] = []
    for host, record in newest_saves(progress).items():
        if record.state is UpdateState.FAILED and record.update is not None:
            said.append(f"{host} could not save step {_step(record)}: {record.update.message or record.update.code}")
        elif record.state is not UpdateState.SUCCEEDED:
            said.append(f"{host} did not save step {_step(record)} in time")
    return "; ".join(said)


def outcome(progress: ActionProgress) -> str:
    """What is where when it is over."""
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
            found.append(f"{host} has {reached or 'nothing of it'}")
        else:
            found.append(f"{host} did not tell in time what it flushed")
    where = f" ({'; '.join(found)})" if found else ""
    if failure and progress.plan.spec.checkpoint.is_durable:
        return f"{failure}. The newest recovery point was flushed instead{where}."
    if failure:
        return f"{failure}. The newest recovery point in memory stands instead."
    return f"step {step} is saved{where}"


def _step(record: OutboxCommand) -> int:
    return record.command.body.step if isinstance(record.command.body, SaveEmergency) else -1
