"""Completed steps of generations whose placement this sensor has not read yet. Pure.

A host may report such steps just before the sensor reads the placement; a faulty daemon may make them up. So they wait
here until the placement is known. Then they are summed up, or dropped if the host was not given these ranks.
"""

from __future__ import annotations

from collections import deque

from flyball.contracts.reports.rank_columns import CompletedSteps
from services.sensor.rules.placed import Placed

WAIT_S = 60.0  # a placement is read within a second while the database answers
MAX_MOMENTS = 50_000  # of one host; further ones are dropped
MAX_HOSTS = 20_000


class EarlySteps:
    """`now_s` is a monotonic clock."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, str, CompletedSteps]] = deque()
        self._moments: dict[str, int] = {}  # waiting, by host

    def wait(self, host_id: str, steps: CompletedSteps, now_s: float) -> None:
        """Keep these until their placement is known."""
        moments = self._moments.get(host_id, 0) + _moments(steps)
        if moments <= MAX_MOMENTS and (host_id in self._moments or len(self._moments) < MAX_HOSTS):
            self._moments[host_id] = moments
            self._waiting.append((now_s, host_id, steps))

    def take(self, placed: Placed, now_s: float) -> list[tuple[str, tuple[CompletedSteps, ...]]]:
        """Take out the steps whose placement is known by now, by host, if they are of its own ranks. Those that waited
        for too long are dropped."""
        if not self._waiting:
            return []
        taken = []
        waiting, self._waiting, self._moments = self._waiting, deque(), {}
        for since_s, host_id, steps in waiting:
            if not placed.is_early(steps):
                if own := placed.own_steps(host_id, (steps,)):
                    taken.append((host_id, own))
            elif now_s - since_s <= WAIT_S:
                self._moments[host_id] = self._moments.get(host_id, 0) + _moments(steps)
                self._waiting.append((since_s, host_id, steps))
        return taken

    def __len__(self) -> int:
        return len(self._waiting)


def _moments(steps: CompletedSteps) -> int:
    return len(steps.ranks) * len(steps.completed_at)
