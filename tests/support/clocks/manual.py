"""A clock that moves only on request."""

from __future__ import annotations


class ManualClock:
    """Wall and monotonic clock in one, in seconds."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds
