"""How long a daemon goes on that is told that another one speaks for its host. Pure."""

from __future__ import annotations

from flyball.contracts.clock import Clock
from flyball.contracts.errors import DaemonSuperseded

LEAST_S = 5.0
INTERVALS = 5.0  # between reports; the supervisor gives a dead daemon up before


class RefusedPolls:
    """Of one loop."""

    def __init__(self, clock: Clock, report_interval_s: float) -> None:
        self._clock = clock
        self._bearable_s = max(LEAST_S, INTERVALS * report_interval_s)
        self._since_s: float | None = None

    def ended(self) -> None:
        """It was heard."""
        self._since_s = None

    def note(self, error: DaemonSuperseded) -> None:
        """It was refused. Raises `error` when it has been for so long that the other daemon is no dead one."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > self._bearable_s:
            raise error
