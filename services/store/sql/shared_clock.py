"""One clock for all processes of the control plane: the database's.

One process records when a host last reported, and another judges it. With clocks of their own, a sensor whose clock is
some seconds ahead would make a dead host look as if it had come back.
"""

from __future__ import annotations

import threading

import structlog
from sqlalchemy import Connection

from flyball.contracts.clock import Clock
from services.runtime.outages import OUTAGES, Outage
from services.store.sql.database import Database
from services.store.sql.lease import database_now

MEASURE_EVERY_S = 1.0
EXACT_S = 0.005  # smaller differences are ignored: the reply takes about as long
WARN_S = 1.0  # larger differences are logged

_log = structlog.get_logger(__name__)


class SharedClock:
    """A `Clock` whose wall time is the database's, as last measured. SQLite uses the machine's clock. Monotonic time is
    always the machine's. Thread-safe."""

    def __init__(self, clock: Clock, db: Database) -> None:
        self._clock = clock
        self._db = db
        self._ahead_s = 0.0  # the database's time minus the machine's
        self.monotonic_s = clock.monotonic_s  # the machine's; read for every report

    def wall_s(self) -> float:
        """Return seconds since the Unix epoch by the database's clock."""
        return self._clock.wall_s() + self._ahead_s

    def measure(self) -> None:
        """Compare clocks with the database. If it raises what `Database.read` raises, the last result stays valid."""
        if self._db.is_sqlite:
            return
        with self._db.read() as connection:
            ahead_s, error_s = self._compare(connection)
        if abs(ahead_s - self._ahead_s) <= error_s + EXACT_S:
            return
        if abs(ahead_s - self._ahead_s) > WARN_S:
            _log.warning(
                "the machine's clock differs from the database's, which is used",
                ahead_s=round(ahead_s, 3),
                before_s=round(self._ahead_s, 3),
                hint="synchronize the machines of the control plane with NTP",
            )
        self._ahead_s = ahead_s

    def run(self, stop: threading.Event) -> None:
        """Measure until stopped. Waits out outages of the database."""
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
        """Return how far the database is ahead, and the possible error. Reads wall time once, because it may jump."""
        database_now(connection)  # connects and tests the connection, so that the next reply is quick
        began_s, began = self._clock.monotonic_s(), self._clock.wall_s()
        now = database_now(connection)
        error_s = (self._clock.monotonic_s() - began_s) / 2.0
        return now - (began + error_s), error_s
