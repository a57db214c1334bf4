"""Simulated time: an ordered queue of what happens next. Pure; chance comes in as a seeded generator."""

from __future__ import annotations

import heapq
from collections.abc import Callable

BEGAN_AT = 1_000_000.0  # wall clock at the start

Happening = Callable[[], None]


class EventQueue:
    """What is due first happens first; of two at the same moment the one that was planned first."""

    def __init__(self) -> None:
        self.now = BEGAN_AT
        self._queue: list[tuple[float, int, Happening]] = []
        self._planned = 0

    def after(self, delay_s: float, happening: Happening) -> None:
        """Plan something."""
        self._planned += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._planned, happening))

    def run_until(self, at: float, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen that is due by then, or until `unless`. It may be called from within a happening: time
        goes on for all others while that one is held up."""
        while self._queue and self._queue[0][0] <= at and not unless():
            due, _, happening = heapq.heappop(self._queue)
            self.now = max(self.now, due)
            happening()
        if not unless():
            self.now = max(self.now, at)


class MachineClock:
    """A machine's clocks: the wall clock may be set wrong, the monotonic one runs on."""

    def __init__(self, timeline: EventQueue) -> None:
        self._timeline = timeline
        self.error_s = 0.0

    def wall_s(self) -> float:
        return self._timeline.now + self.error_s

    def monotonic_s(self) -> float:
        return self._timeline.now - BEGAN_AT
