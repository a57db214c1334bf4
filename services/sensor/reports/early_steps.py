"""Steps of generations of which a sensor does not know yet who was given their ranks. Pure.

A host may tell of them before the sensor has read the placement, and a daemon may make them up. So they wait here, and
are summed up once it is known whose they are; what nobody was given is dropped.
"""

from __future__ import annotations

from collections import deque

from flyball.contracts.reports.rank_columns import CompletedSteps
from services.sensor.reports.placed import Placed

WAIT_S = 60.0  # a placement is read within a second while the database answers
MAX_MOMENTS = 50_000  # that wait of one host: what is more is let go
MAX_HOSTS = 20_000


class EarlySteps:
    """`now_s` is a monotonic clock."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, str, CompletedSteps]] = deque()
        self._moments: dict[str, int] = {}  # that wait, by host

    def wait(self, host_id: str, steps: CompletedSteps, now_s: float) -> None:
        """Keep these until their generation is known."""
        moments = self._moments.get(host_id, 0) + _moments(steps)
        if moments <= MAX_MOMENTS and (host_id in self._moments or len(self._moments) < MAX_HOSTS):
            self._moments[host_id] = moments
            self._waiting.append((now_s, host_id, steps))

    def take(self, placed: Placed, now_s: float) -> list[tuple[str, tuple[CompletedSteps, ...]]]:
        """Steps of generations that are known by now, with their host, as far as it was given their ranks. They, and
        what waited for too long, are forgotten here."""
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
