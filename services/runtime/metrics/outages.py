"""How a loop behaves while the database is away: it goes on trying, ever more slowly, and says so once."""

from __future__ import annotations

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError, FlyballError, StorageFull, TooBusy, Unreachable

# What passes by itself, or when a person has helped; the rest are faults. Loops run only where the settings were right
# at the start: what looks like a wrong one afterwards (a password that was changed, a disk that was mounted read-only)
# happened to the database, and is mended there.
OUTAGES = (Unreachable, StorageFull, TooBusy, ConfigurationError)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

_log = structlog.get_logger(__name__)


class Outage:
    """Of one loop. A service never gives up, so its pauses have a bound and its attempts have none."""

    def __init__(self, loop: str, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._began_s: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, error: FlyballError) -> float:
        """Note a failure; how long to wait before the next attempt."""
        if self._began_s is None:
            self._began_s = self._clock.monotonic_s()
            self._pause_s = FIRST_PAUSE_S
            _log.warning("outage_began", loop=self._loop, code=error.code, error=str(error))
        pause_s, self._pause_s = self._pause_s, min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def ended(self) -> None:
        """Note a success."""
        if self._began_s is not None:
            _log.info("outage_ended", loop=self._loop, seconds=round(self._clock.monotonic_s() - self._began_s, 3))
            self._began_s = None
