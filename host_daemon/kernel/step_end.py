"""Whether a batch system is ending the step that this host daemon belongs to: its SIGTERM came, to all processes.

A script with a handler of its own may have ended, with exit code 0, before the supervisor hears of it. That is no
success, of which checkpoints would be removed, and no fault.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from flyball.batch_step import DEFAULT_NOTICE_S
from flyball.contracts.clock import Clock

_ONE_BY_ONE_S: Final = 0.2  # between the first process that is signalled and the last


class StepEnd:
    def __init__(self, leader: int, clock: Clock) -> None:
        """`leader`: as of `flyball.batch_step.leader_of`; 0: this is no such step."""
        self._leader = leader
        self._clock = clock
        self._signalled_s = -math.inf

    def note(self) -> None:
        """SIGTERM came, whoever sent it."""
        self._signalled_s = self._clock.monotonic_s()

    async def has_ended(self, exit_code: int | None) -> bool:
        """Whether a worker that ended just now did so because of that."""
        if self._leader and exit_code == 0:
            await asyncio.sleep(_ONE_BY_ONE_S)
        return bool(self._leader) and self._clock.monotonic_s() < self._signalled_s + DEFAULT_NOTICE_S
