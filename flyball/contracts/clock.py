"""The only place where Flyball reads a clock, so that the simulator can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time marks moments that people and other machines read; monotonic time measures durations."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never jumps; comparable on one machine only."""
        ...


class SleepingClock(Clock, Protocol):
    """A clock whose time a loop lets pass."""

    def sleep(self, seconds: float, /) -> None: ...


class SystemClock:
    """The machine's own clocks."""

    wall_s = staticmethod(time.time)  # noqa: TID251 - this is the one place
    monotonic_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
