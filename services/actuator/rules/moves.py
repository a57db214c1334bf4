"""Builds the next move of an action: its commands with their names and time limits, or its end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flyball.contracts.decisions import (
    ActionState,
    CheckHost,
    CommandBody,
    EndJob,
    SaveEmergency,
    StopWorkers,
    UpdateState,
    WarmUp,
)
from services.actuator.ports import ANSWER_SLACK_S, ActionProgress, CommandDraft, OutboxCommand, PlaybookStep
from services.actuator.rules.command_bodies import DEFAULT_FLUSH_S, save_limit_s, why
from services.rules.incident_states import ACTION, ActionEvent

_STOP_TIMEOUT_S = 15.0  # beyond the grace
_CHECK_MARGIN_S = 8.0  # for the processes of a check to be started and ended


def drafts(
    progress: ActionProgress, phase: str, bodies: Iterable[tuple[str, CommandBody]], now: float
) -> list[CommandDraft]:
    """A command for each of these hosts. Its name counts the commands of this phase to the host."""
    asked = Counter(
        record.command.host_id
        for record in progress.commands
        if record.phase == phase and not isinstance(record.command.body, WarmUp)
    )
    return [
        CommandDraft(
            f"{progress.action_id}.{phase}.{host}.{asked[host] + 1}", host, body, _limit_s(progress, body, now)
        )
        for host, body in bodies
    ]


def _limit_s(progress: ActionProgress, body: CommandBody, now: float) -> float:
    remaining_s = progress.remaining_s(now)
    match body:
        case StopWorkers():
            limit_s = progress.plan.grace_s + _STOP_TIMEOUT_S + body.flush_timeout_s - DEFAULT_FLUSH_S
        case EndJob():
            limit_s = progress.plan.grace_s + _STOP_TIMEOUT_S
        case CheckHost():
            limit_s = body.timeout_s + _CHECK_MARGIN_S
        case SaveEmergency():
            limit_s = save_limit_s(body, remaining_s)
        case _:
            limit_s = remaining_s
    return min(limit_s, remaining_s)


def number(command_id: str) -> int:
    """Return the number of this command among those of its phase to its host, from 1."""
    return int(command_id.rpartition(".")[2])


def move(
    progress: ActionProgress,
    phase: str,
    state: ActionState,
    commands: tuple[CommandDraft, ...],
    *,
    message: str,
    now: float,
) -> PlaybookStep:
    soonest_s = min((draft.deadline_s + ANSWER_SLACK_S for draft in commands), default=0.0)
    wake_at = min(now + soonest_s, progress.deadline_at)
    attempt = progress.attempt if phase == progress.phase else 1
    return PlaybookStep(phase, state, commands=commands, message=message, attempt=attempt, wake_at=wake_at)


def end(progress: ActionProgress, event: ActionEvent, message: str) -> PlaybookStep:
    """The last move of an action."""
    return PlaybookStep(
        progress.phase, ACTION.advance(progress.state, event), message=message, attempt=progress.attempt
    )


def names(hosts: Iterable[str]) -> str:
    listed = list(hosts)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") if listed else "no host"


def failure_message(phase: str, failed: Iterable[OutboxCommand]) -> str:
    """Which hosts could not carry out their commands of a phase, and why."""
    reasons = {r.command.host_id: why(r.update) for r in failed if r.update is not None}
    return "; ".join(f"{host} could not {phase}: {reason}" for host, reason in reasons.items())


def nobody_listed(asked: Iterable[OutboxCommand], job: str) -> str:
    """Why a job is not started: no host could say which copies of it are left."""
    failed: list[OutboxCommand] = []
    silent: list[str] = []
    for record in asked:
        if record.state in (UpdateState.FAILED, UpdateState.REFUSED):
            failed.append(record)
        else:
            silent.append(record.command.host_id)
    why = "; ".join(
        ([failure_message("list the copies", failed)] if failed else [])
        + ([f"{names(silent)} did not answer"] if silent else [])
    )
    return (
        f"{why}. Its store or disks may hold progress of {job}, so it does not start from scratch. If they are gone "
        f"for good: flyball stop {job}, then the same command with --fresh."
    )
