"""Outages of the database or Redis: which errors they raise, and how a loop waits for their end."""

from __future__ import annotations

import structlog

from flyball.backoff import Backoff
from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError, FlyballError, StorageFull, TooBusy, Unreachable

log = structlog.get_logger(__name__)

# Errors that pass by themselves or once somebody repairs the database; all others are bugs. ConfigurationError is among
# them because settings were correct at the start: a changed password or a disk remounted read-only is an outage.
OUTAGES = (Unreachable, StorageFull, TooBusy, ConfigurationError)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Outage:
    """The back-off of one loop while the database or Redis is away. Logs start and end; the retries never stop."""

    def __init__(self, loop: str, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._began_s: float | None = None
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def pause_s(self, error: FlyballError) -> float:
        """Record a failure. Return how long to wait before the next attempt."""
        if self._began_s is None:
            self._began_s = self._clock.monotonic_s()
            log.warning("outage_began", loop=self._loop, code=error.code, error=str(error))
        return self._backoff.failed()

    def ended(self) -> None:
        """Record a success."""
        if self._began_s is not None:
            log.info("outage_ended", loop=self._loop, seconds=round(self._clock.monotonic_s() - self._began_s, 3))
            self._began_s = None
            self._backoff.succeeded()
