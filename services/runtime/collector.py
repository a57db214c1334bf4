"""The garbage collector in a process with very many objects that live long: a full collection stops all threads while
it looks through them, and of 10,000 hosts there are a million."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

from flyball.contracts.clock import Clock

LONG_S = 0.02  # a full collection that is over sooner may go on looking at everything
LOOK_THROUGH_EVERY_S = 3600.0


class LeaveOutOld:
    """For `gc.callbacks`. What has lived through a full collection that took long is left out of those to come; what
    of it is dropped is freed all the same, unless it is part of a cycle. For these, all is looked through once an
    hour."""

    def __init__(
        self, clock: Clock, *, freeze: Callable[[], None] = gc.freeze, unfreeze: Callable[[], None] = gc.unfreeze
    ) -> None:
        self._clock = clock
        self._freeze = freeze
        self._unfreeze = unfreeze
        self._began_s = 0.0
        self._looks_through_s: float | None = None  # when all is to be looked at again

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """As the collector calls it: `phase` "start" or "stop", `info` with the `generation` that it looked at."""
        if info["generation"] != 2:
            return
        now_s = self._clock.monotonic_s()
        if phase == "start":
            self._began_s = now_s
        elif self._looks_through_s is not None and now_s >= self._looks_through_s:
            self._looks_through_s = None
            self._unfreeze()  # the next one is a long one
        elif now_s - self._began_s >= LONG_S:
            self._freeze()
            if self._looks_through_s is None:
                self._looks_through_s = now_s + LOOK_THROUGH_EVERY_S
