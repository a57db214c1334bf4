"""Exchanges with the other sensors, through the database, what is seen of ranks that stand still.

A job that hangs has ranks on hosts that report to several sensors. Each stores what its own ranks do, once a second and
only while they stand, and reads what the others store. A healthy job writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from flyball.contracts.clock import Clock
from services.runtime.outages import OUTAGES, Outage
from services.sensor.detector.shared_stands import JobStand

EVERY_S = 1.0
STALE_S = 5.0  # a sensor whose entry has not changed for this long is away: its ranks may work

Told = Mapping[str, tuple[float, tuple[JobStand, ...]]]  # sensor -> when it wrote (its wall clock), and what


class StandStore(Protocol):
    def tell_stands(self, sensor: str, at: float, stands: tuple[JobStand, ...]) -> None: ...

    def told_stands(self) -> Told: ...


class StandingSensor(Protocol):
    """The sensor."""

    @property
    def has_ranks_elsewhere(self) -> bool: ...

    def stands(self) -> tuple[JobStand, ...]: ...

    def hear(self, told: Mapping[str, tuple[JobStand, ...]]) -> None: ...


class FreshStands:
    """The entries that advance. Only whether they do counts: the clocks of sensors may disagree. Pure."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: dict[str, tuple[float, float]] = {}  # sensor -> its `at`, and when that was new

    def of(self, told: Told, now_s: float) -> dict[str, tuple[JobStand, ...]]:
        """The entries of other sensors that changed within STALE_S."""
        before, self._seen = self._seen, {}
        for name, (at, _) in told.items():
            if name != self._own:
                known = before.get(name)
                self._seen[name] = known if known is not None and known[0] == at else (at, now_s)
        return {name: told[name][1] for name, (_, since_s) in self._seen.items() if now_s - since_s <= STALE_S}


async def run_exchange(listener: StandingSensor, sensor: str, clock: Clock, store: StandStore) -> None:
    """Tell and hear until cancelled."""
    outage, fresh = Outage("stands", clock), FreshStands(sensor)
    has_told = False
    while True:
        wait_s = EVERY_S
        try:
            stands = listener.stands()
            if stands or has_told:
                await asyncio.to_thread(store.tell_stands, sensor, clock.wall_s(), stands)
                has_told = bool(stands)
            told = await asyncio.to_thread(store.told_stands) if listener.has_ranks_elsewhere else {}
            listener.hear(fresh.of(told, clock.monotonic_s()))
            outage.ended()
        except OUTAGES as error:
            wait_s = outage.pause_s(error)
            listener.hear({})
        await asyncio.sleep(wait_s)
