"""Whether a batch system is ending the step that this host daemon belongs to: its SIGTERM came, to all processes.

A worker with a handler of its own may have ended, with exit code 0, before the supervisor hears of it. That is no
success, of which checkpoints would be removed, and no fault.
"""

from __future__ import annotations

import asyncio
import math
import os
from typing import Final

from flyball.batch_step import notice_s
from flyball.contracts.clock import Clock

_ONE_BY_ONE_S: Final = 0.1  # between the first process that is signalled and the last


class StepEnd:
    def __init__(self, leader: int, clock: Clock) -> None:
        """`leader`: as of `flyball.batch_step.leader_of`; 0: this is no such step."""
        self._leader = leader
        self._clock = clock
        self._until_s = -math.inf

    def note(self) -> None:
        """SIGTERM came, whoever sent it. Workers have as long as the batch system gives them."""
        self._until_s = self._clock.monotonic_s() + notice_s(os.environ, self._clock.wall_s())

    async def has_come(self) -> bool:
        """Whether a worker that ended just now may have done so because of that."""
        if not self._leader:
            return False
        await asyncio.sleep(_ONE_BY_ONE_S)
        return self._clock.monotonic_s() < self._until_s
