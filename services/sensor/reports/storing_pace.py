"""Paces the storing of state by the age of what waits, and never by how long the storing itself waits for a core. Pure.

All threads of a sensor share one core, by the interpreter lock, and its event loop answers every host. So the storing
thread works for a small share of the time, and for as much as it takes once something has waited for long.
"""

from __future__ import annotations

from math import inf

MAX_SHARE = 1 / 2  # of a core, however late it is: the event loop goes on


class StoringPace:
    """The pace of one kind of state. Times are monotonic."""

    def __init__(self, *, within_s: float, share: float) -> None:
        """`within_s`: how old state may become before it is stored. `share`: of a core, while it is younger."""
        self._young_s = within_s / 2  # the rest of the time is for the work
        self._share = share
        self._ended_s = -inf
        self._cost_s = 0.0

    def worked(self, cost_s: float, ended_s: float) -> None:
        """A part was stored, which took `cost_s` of a core."""
        self._cost_s, self._ended_s = cost_s, ended_s

    def opens_s(self, oldest_s: float) -> float:
        """The moment when to store the next part. `oldest_s`: since when the oldest state has waited; inf: there is
        none."""
        rested_s = self._ended_s + self._cost_s * (1.0 / self._share - 1.0)
        at_least_s = self._ended_s + self._cost_s * (1.0 / MAX_SHARE - 1.0)
        return max(at_least_s, min(rested_s, oldest_s + self._young_s))
