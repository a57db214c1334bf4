"""The signal stream and the wake-ups of one process: through Redis, or through the database and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import Unreachable
from flyball.contracts.reports.signals import Signal, SignalUnreadable
from services.bus.embedded import EmbeddedBus
from services.rules.stream import Cursor, Delivered
from services.runtime.health import Check
from services.runtime.loops import Loop
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.store.sql.database import Database

if TYPE_CHECKING:  # redis is imported only if it is used
    from services.bus.redis_client import RedisServer
    from services.bus.redis_streams import RedisBus

MEASURE_EVERY_S = 5.0

# The wake-ups of other processes that each part listens to.
TOPICS_OF = {
    "sensor": ("events",),
    "controller": ("signals",),
    "actuator": ("actions", "commands"),
    "api": ("events",),
}

_log = structlog.get_logger(__name__)


class MeasuredBus:
    """A `SignalBus` with metrics of its length and of the duration of publications."""

    def __init__(self, bus: EmbeddedBus | RedisBus, metrics: Metrics, clock: Clock) -> None:
        self._bus = bus
        self._metrics = metrics
        self._clock = clock

    def publish(self, signals: Sequence[Signal]) -> None:
        """Publish, and measure the duration, of failures too."""
        with self._metrics.bus_publish_seconds.time():
            self._bus.publish(signals)

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """Read, and count unreadable signals."""
        delivered = self._bus.read(after, limit=limit)
        self._metrics.signals_unreadable.inc(sum(isinstance(d.signal.body, SignalUnreadable) for d in delivered))
        return delivered

    def trim(self, upto: Cursor) -> None:
        """Trim the bus."""
        self._bus.trim(upto)

    async def measure(self) -> None:
        """Update the metric of the length until cancelled."""
        outage = Outage("bus-length", self._clock)
        while True:
            wait_s = MEASURE_EVERY_S
            try:
                self._metrics.bus_length.set(await asyncio.to_thread(self._bus.length))
                outage.ended()
            except OUTAGES as error:
                self._metrics.bus_length.set(float("nan"))
                wait_s = max(wait_s, outage.pause_s(error))
            await asyncio.sleep(wait_s)


class Messaging:
    """Built from the settings. The caller runs `loops` and polls `checks`."""

    bus: MeasuredBus
    wakeup: LocalWakeup

    def __init__(
        self, *, redis_url: str, prefix: str, parts: Iterable[str], db: Database, metrics: Metrics, clock: Clock
    ) -> None:
        """Empty `redis_url`: the stream is in the database, and other processes are not woken. Raises
        ConfigurationError for a URL that is not a Redis URL."""
        self.loops: dict[str, Loop] = {}
        self.checks: dict[str, Check] = {}
        self._redis: RedisServer | None = None
        if not redis_url:
            self.bus = MeasuredBus(EmbeddedBus(db), metrics, clock)
            self.wakeup = LocalWakeup()
            return
        from services.bus.redis_client import RedisServer
        from services.bus.redis_streams import RedisBus
        from services.bus.redis_wakeup import RedisWakeup

        redis = self._redis = RedisServer(redis_url)
        topics = sorted({topic for part in parts for topic in TOPICS_OF[part]})
        wakeup = self.wakeup = RedisWakeup(redis, prefix=prefix, topics=topics, clock=clock)
        self.bus = MeasuredBus(RedisBus(redis, prefix=prefix), metrics, clock)
        self.loops = {"wakeup-sender": wakeup.run_sender, "wakeup-listener": wakeup.run_listener}
        self.checks = {"redis": self._redis_problem}

    def open(self) -> None:
        """Raise ConfigurationError if this Redis is unsuitable. If it is away, start anyway: training and everything
        that needs no signals work without it."""
        try:
            for check in self.checks.values():
                check()
        except Unreachable as error:
            _log.warning("redis_away_at_start", error=str(error))

    def close(self) -> None:
        """Close the connections."""
        if self._redis:
            self._redis.close()

    def _redis_problem(self) -> str:
        if self._redis:
            self._redis.check()
        return ""
