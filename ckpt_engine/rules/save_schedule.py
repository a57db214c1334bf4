"""Decides which steps are saved to memory. Pure.

For an interval in steps, every rank computes the same steps by itself; slow saves widen the interval (`save_pace`). For
an interval in seconds, the coordinator names a step that lies ahead of all ranks.

If some rank has passed a step before it receives the name, that step is abandoned, and the next one is named further
ahead. So a slow network delays a save, but never leaves ranks without a common step.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

from flyball.contracts.checkpoints import CheckpointSpec, Tier

_MIN_LEAD_S = 0.1  # a name travels for milliseconds, and ranks may be a step or two ahead of rank 0
_MAX_LEAD_S = 60.0
_MARGIN_STEPS = 2
_REMEMBERED_MOVES = 16
_SELDOM = 8  # times the shortest interval
_SAVING_TIERS = (Tier.MEMORY, Tier.DISK, Tier.PERSISTENT)


def is_due(spec: CheckpointSpec, step: int, named_step: int = -1, factor: int = 1) -> bool:
    """Whether some tier wants this step, which the memory tier then has to hold first. `named_step` is the
    coordinator's last name for tiers with an interval in seconds, -1 for none.

    A `factor` above 1 (`save_pace`) multiplies the shortest interval in steps. Other intervals then add steps of their
    own only if they are much longer; a slow tier otherwise gets the next step that is saved. Steps that stay for ever
    count as such a long interval.
    """
    if step == named_step:
        return True
    if factor == 1:
        return any(step % every_steps == 0 for every_steps in _intervals_steps(spec))
    least = interval_steps(spec) * factor
    seldom = (every_steps for every_steps in _intervals_steps(spec, kept=True) if every_steps >= _SELDOM * least)
    return least > 0 and (step % least == 0 or any(step % every_steps == 0 for every_steps in seldom))


def interval_steps(spec: CheckpointSpec) -> int:
    """The shortest interval in steps of any tier, 0 if no tier has one."""
    return min(_intervals_steps(spec), default=0)


@lru_cache(maxsize=64)  # called at every step of training
def _intervals_steps(spec: CheckpointSpec, *, kept: bool = False) -> tuple[int, ...]:
    """The intervals of all tiers; `kept`: also those of steps that stay for ever."""
    policies = [policy for tier in _SAVING_TIERS if (policy := spec.policy(tier)).every_steps > 0]
    stay = [math.lcm(policy.every_steps, policy.keep_every) for policy in policies if kept and policy.keep_every > 0]
    return (*(policy.every_steps for policy in policies), *stay)


def interval_s(spec: CheckpointSpec) -> float:
    """The shortest interval in seconds of any tier, 0.0 if no tier has one."""
    return min((every_s for tier in _SAVING_TIERS if (every_s := spec.policy(tier).every_s) > 0), default=0.0)


class SaveSchedule:
    """Takes time, positions and world steps, and returns the next step to save. Run by the coordinator."""

    def __init__(self, every_s: float, *, named: int, world_step: int, now_s: float) -> None:
        """`named`: the newest step known to have been named, else the restore step. The first interval begins now."""
        self.named = named
        self._every_s = every_s
        self._world_step = world_step
        self._saved_at_s = now_s
        self._lead_s = _MIN_LEAD_S
        self._settled = named
        self._moves: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_MOVES)
        self._stride = 0  # greatest common divisor of the distances between positions

    def tick(self, now_s: float, *, position: int, world_step: int, is_abandoned: bool) -> bool:
        """`position`: the newest step that a rank of this host began to save or passed by, -1 for none. `is_abandoned`:
        whether `named` is. Returns whether a new step was named. It stays until it is the world step, or abandoned."""
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
        """A step that no rank will have reached when the name arrives, and that every rank will be at: a script that
        calls `save` only at every tenth step is never at the others."""
        began_s, first = self._moves[0]
        steps_per_s = (self._moves[-1][1] - first) / (now_s - began_s) if now_s > began_s else 0.0
        margin = math.ceil(steps_per_s * self._lead_s) + _MARGIN_STEPS
        stride = max(self._stride, 1)
        newest = self._moves[-1][1]
        return newest + stride * math.ceil((position - newest + margin) / stride)
