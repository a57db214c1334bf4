"""One time for all processes of the control plane: the database's.

When a host was last heard of is told by one process and judged by another. Were that each one's own time, a sensor
whose clock is some seconds ahead would make a host that died look as if it had come back.
"""

from __future__ import annotations

import threading

import structlog
from sqlalchemy import Connection

from flyball.contracts.clock import Clock
from services.runtime.loops import OUTAGES, Outage
from services.store.sql.database import Database
from services.store.sql.lease import database_now

MEASURE_EVERY_S = 1.0
EXACT_S = 0.005  # a difference that is smaller is none: the answer takes about as long
TOLD_S = 1.0  # a machine whose clock is that wrong is told of

_log = structlog.get_logger(__name__)


class SharedClock:
    """A `Clock` whose wall time is the database's, as last measured. SQLite has its machine's, and nothing to measure.
    Monotonic time is the machine's own. Thread-safe."""

    def __init__(self, clock: Clock, db: Database) -> None:
        self._clock = clock
        self._db = db
        self._ahead_s = 0.0  # of the database's time, before the machine's

    def wall_s(self) -> float:
        """By the database, seconds since the Unix epoch."""
        return self._clock.wall_s() + self._ahead_s

    def monotonic_s(self) -> float:
        """The machine's."""
        return self._clock.monotonic_s()

    def measure(self) -> None:
        """Ask the database. Raises what `Database.read` does; then the last answer holds on."""
        if self._db.is_sqlite:
            return
        with self._db.read() as connection:
            ahead_s, error_s = self._compare(connection)
        if abs(ahead_s - self._ahead_s) <= error_s + EXACT_S:
            return
        if abs(ahead_s - self._ahead_s) > TOLD_S:
            _log.warning(
                "the machine's clock is not the database's, which counts",
                ahead_s=round(ahead_s, 3),
                before_s=round(self._ahead_s, 3),
                hint="let the machines of the control plane keep time with NTP",
            )
        self._ahead_s = ahead_s

    def run(self, stop: threading.Event) -> None:
        """Go on measuring, until stopped."""
        outage = Outage("shared-clock", self._clock)
        wait_s = 0.0
        while not stop.wait(wait_s):
            try:
                self.measure()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            else:
                outage.ended()
                wait_s = MEASURE_EVERY_S

    def _compare(self, connection: Connection) -> tuple[float, float]:
        """How far the database is ahead, and by how much that may be wrong. Wall time is read once: it may jump."""
        database_now(connection)  # the first answer waits for the connection to be made and tried
        began_s, began = self._clock.monotonic_s(), self._clock.wall_s()
        now = database_now(connection)
        error_s = (self._clock.monotonic_s() - began_s) / 2.0
        return now - (began + error_s), error_s
