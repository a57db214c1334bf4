"""Which steps are saved to memory: those that an interval in steps names, the same for every rank without a word (times
a factor, where saves are slow: `save_pace`); and,
for an interval in seconds, one that the coordinator names ahead of all ranks. Pure.

A step that some rank had passed when it heard the name can never be complete: it is abandoned, and the next one is
named further ahead. So a slow network costs a late save, never two ranks with different steps and no common one.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

from flyball.contracts.checkpoints import CheckpointSpec, Tier

_MIN_LEAD_S = 0.1  # a name travels for milliseconds; ranks may be ahead of rank 0 by a step or two as well
_MAX_LEAD_S = 60.0
_MARGIN_STEPS = 2
_REMEMBERED_MOVES = 16
_SELDOM = 8  # times as far apart as the steps that are saved anyway
_SAVING_TIERS = (Tier.MEMORY, Tier.DISK, Tier.PERSISTENT)


def is_due(spec: CheckpointSpec, step: int, named_step: int = -1, factor: int = 1) -> bool:
    """Whether some tier wants this step; the memory tier has to hold it first, whichever it is. `named_step` is what
    the coordinator named last for the tiers with an interval in seconds, -1 for nothing.

    With a `factor` above 1 (`save_pace`) the shortest interval in steps is multiplied by it, and others name steps of
    their own only where these are seldom: a slow tier gets the next step instead. What stays for ever is seldom."""
    if step == named_step:
        return True
    if factor == 1:
        return any(step % every_steps == 0 for every_steps in _intervals_steps(spec))
    least = interval_steps(spec) * factor
    seldom = (every_steps for every_steps in _intervals_steps(spec, kept=True) if every_steps >= _SELDOM * least)
    return least > 0 and (step % least == 0 or any(step % every_steps == 0 for every_steps in seldom))


def interval_steps(spec: CheckpointSpec) -> int:
    """The shortest interval in steps of any tier, 0 if there is none."""
    return min(_intervals_steps(spec), default=0)


@lru_cache(maxsize=64)  # asked at every step of training
def _intervals_steps(spec: CheckpointSpec, *, kept: bool = False) -> tuple[int, ...]:
    """Of all tiers; `kept`: with those of what stays there."""
    policies = [policy for tier in _SAVING_TIERS if (policy := spec.policy(tier)).every_steps > 0]
    stay = [math.lcm(policy.every_steps, policy.keep_every) for policy in policies if kept and policy.keep_every > 0]
    return (*(policy.every_steps for policy in policies), *stay)


def interval_s(spec: CheckpointSpec) -> float:
    """The shortest interval in seconds of any tier, 0.0 if there is none."""
    return min((every_s for tier in _SAVING_TIERS if (every_s := spec.policy(tier).every_s) > 0), default=0.0)


class SaveSchedule:
    """The coordinator's: time, positions and world steps in, the step to save next out."""

    def __init__(self, every_s: float, *, named: int, world_step: int, now_s: float) -> None:
        """`named`: the newest name that is known to have been given, else the restore step. `world_step` is the present
        one. The first interval begins now."""
        self.named = named
        self._every_s = every_s
        self._world_step = world_step
        self._saved_at_s = now_s
        self._lead_s = _MIN_LEAD_S
        self._settled = named
        self._moves: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_MOVES)
        self._stride = 0  # divides the distance of all positions that were seen

    def tick(self, now_s: float, *, position: int, world_step: int, is_abandoned: bool) -> bool:
        """`position`: the newest step that a rank in sight began to save or passed by, -1 for none. `is_abandoned`: of
        `named`. True if a new step was named; until it is the world step or abandoned no other is."""
        self._note_position(now_s, position)
        if world_step > self._world_step:
            self._world_step, self._saved_at_s = world_step, now_s
        if self.named > world_step and not is_abandoned:
            return False
        if self.named > self._settled:
            self._settled = self.named
            self._lead_s = min(2 * self._lead_s, _MAX_LEAD_S) if is_abandoned else max(_MIN_LEAD_S, 0.95 * self._lead_s)
        if position < 0 or now_s - self._saved_at_s < self._every_s:
            return False
        self.named = self._ahead_of(now_s, max(position, self.named))
        return True

    def _note_position(self, now_s: float, position: int) -> None:
        if position < 0 or (self._moves and position <= self._moves[-1][1]):
            return
        if self._moves:
            self._stride = math.gcd(self._stride, position - self._moves[-1][1])
        self._moves.append((now_s, position))

    def _ahead_of(self, now_s: float, position: int) -> int:
        """A step that no rank has reached when the name arrives, and that all will be at: a script that calls `save`
        on every tenth step only is never at the others."""
        began_s, first = self._moves[0]
        steps_per_s = (self._moves[-1][1] - first) / (now_s - began_s) if now_s > began_s else 0.0
        margin = math.ceil(steps_per_s * self._lead_s) + _MARGIN_STEPS
        stride = max(self._stride, 1)
        newest = self._moves[-1][1]
        return newest + stride * math.ceil((position - newest + margin) / stride)
