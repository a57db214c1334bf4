"""Simulated time: an ordered queue of events. Pure; randomness comes from a seeded generator."""

from __future__ import annotations

import heapq
from collections.abc import Callable

BEGAN_AT = 1_767_225_600.0  # the start, 2026 in UTC: goodput takes dates about 1970 for a clock that was never set

Happening = Callable[[], None]


class EventQueue:
    """Runs events in order of time; ties in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = BEGAN_AT
        self.after_each: Happening | None = None  # looks at the world after every event
        self._queue: list[tuple[float, int, Happening]] = []
        self._planned = 0

    def after(self, delay_s: float, happening: Happening) -> None:
        """Plan an event."""
        self._planned += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._planned, happening))

    def run_until(self, at: float, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Run all events due by `at`, or until `unless` is true.

        May be called from within an event: time then passes for all others while that one is delayed.
        """
        while self._queue and self._queue[0][0] <= at and not unless():
            due, _, happening = heapq.heappop(self._queue)
            self.now = max(self.now, due)
            happening()
            if self.after_each is not None:
                self.after_each()
        if not unless():
            self.now = max(self.now, at)


class MachineClock:
    """A machine's clocks: the wall clock can be wrong, the monotonic clock runs on."""

    def __init__(self, timeline: EventQueue) -> None:
        self._timeline = timeline
        self.error_s = 0.0

    def wall_s(self) -> float:
        return self._timeline.now + self.error_s

    def monotonic_s(self) -> float:
        return self._timeline.now - BEGAN_AT
