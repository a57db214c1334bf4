"""An event loop for tests of what happens in time, on a machine that may hold the process up at any moment."""

from __future__ import annotations

import asyncio
import selectors
import time

STEP_S = 0.05


class Steps(selectors.DefaultSelector):
    """Its time goes on in steps: as long as a machine holds the process up, as much may happen in between as in one."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._looked_s = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(STEP_S if timeout is None else min(timeout, STEP_S))
        looked_s = time.monotonic()
        self.now_s += min(looked_s - self._looked_s, 2 * STEP_S)
        self._looked_s = looked_s
        return ready


class SteppedLoop(asyncio.SelectorEventLoop):
    """Here a pause of the process, however long, is none: of what was due meanwhile nothing is late."""

    def __init__(self) -> None:
        self._steps = Steps()
        super().__init__(self._steps)

    def time(self) -> float:
        return self._steps.now_s
