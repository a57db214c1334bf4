"""How long a daemon goes on while its supervisor says that another one acts for the host. Pure."""

from __future__ import annotations

from flyball.contracts.clock import Clock
from flyball.contracts.errors import DaemonSuperseded

LEAST_S = 5.0
INTERVALS = 5.0  # report intervals; the supervisor gives up a dead daemon sooner


class RefusedPolls:
    """The refusals of one loop."""

    def __init__(self, clock: Clock, report_interval_s: float) -> None:
        self._clock = clock
        self._bearable_s = max(LEAST_S, INTERVALS * report_interval_s)
        self._since_s: float | None = None

    def ended(self) -> None:
        """A request was accepted."""
        self._since_s = None

    def note(self, error: DaemonSuperseded) -> None:
        """A request was refused. Raises `error` if that has lasted too long for the other daemon to be a dead one."""
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > self._bearable_s:
            raise error
