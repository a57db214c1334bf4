"""Names the steps of an emergency save, each later than what ranks have passed once all of them know it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from flyball.contracts.decisions import DecisionKind, SaveEmergency
from services.actuator.ports import ActionProgress, OutboxCommand

MAX_NAMES = 16  # each is at least twice as far ahead as the one before: no rank trains that fast
_MARGIN_STEPS = 4


def named_steps(commands: Iterable[OutboxCommand]) -> dict[int, int]:
    """Return each step that was named -> the newest position in the answers to it, -1 for none."""
    positions: defaultdict[int, int] = defaultdict(lambda: -1)
    for record in commands:
        if isinstance(body := record.command.body, SaveEmergency):
            passed = [p.step for p in record.update.result.positions] if record.update else []
            positions[body.step] = max([positions[body.step], *passed])
    return dict(positions)


def next_name(progress: ActionProgress) -> int:
    """The step to name after one that some ranks had passed: twice as far ahead of the newest position as ranks went
    between two answers, and so no less far than the one before."""
    positions = named_steps(progress.commands)
    *_, before, named = (-1, *sorted(positions))
    newest = max(named, positions[named])
    stood = positions.get(before, -1)
    went = newest - (stood if stood >= 0 else named)
    margin: int = _MARGIN_STEPS * 2 ** (progress.attempt - 1)
    return newest + max(margin, 2 * went)


def last_name_at(progress: ActionProgress, now: float) -> float:
    """Until when a step may be named. A job that is being stopped has its workers' grace, from the first one on."""
    if progress.plan.kind is not DecisionKind.STOP_JOB:
        return progress.deadline_at
    named_at = [r.created_at for r in progress.commands if isinstance(r.command.body, SaveEmergency)]
    return min(progress.deadline_at, min(named_at, default=now) + progress.plan.grace_s)
