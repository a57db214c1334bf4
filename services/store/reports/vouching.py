"""Which hosts each sensor has heard of, and when: one small document per sensor and interval, in place of a row per
host and report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, delete, select, update

from services.record.codec import dump, load
from services.store.sql import events
from services.store.sql.tables import vouches
from services.store.sql.upsert import upsert

FORGET_AFTER_S = 600.0  # of a sensor that is heard of no more: each start has a row of its own


def write(
    connection: Connection, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None
) -> None:
    """`ages_ms[i]`: how long before `at` the sensor heard of hosts[i]. `hosts` None: those of the last time."""
    mine = vouches.c.sensor == sensor
    if hosts is None:
        connection.execute(update(vouches).where(mine).values(at=at, ages_ms=dump(ages_ms)))
    else:
        row = {"sensor": sensor, "at": at, "hosts": dump(hosts), "ages_ms": dump(ages_ms)}
        upsert(connection, vouches, [row], replace=("at", "hosts", "ages_ms"))
        connection.execute(delete(vouches).where(vouches.c.at < at - FORGET_AFTER_S))
    events.append(connection, [])


def heard_at(connection: Connection) -> dict[str, float]:
    """Host -> when any sensor last heard of it, as far as sensors vouch for it."""
    return Heard().read(connection).all()


class _Vouched(msgspec.Struct, gc=False):
    """What one sensor says."""

    document: str
    hosts: list[str]
    places: dict[str, int]  # host -> where in `hosts`
    at: float = 0.0
    ages_ms: list[int] = []


class Heard:
    """When any sensor last heard of a host. Which hosts a sensor hears, it seldom changes: that is kept. Belongs to one
    thread."""

    def __init__(self) -> None:
        self._sensors: dict[str, _Vouched] = {}

    def read(self, connection: Connection) -> Heard:
        """As this transaction sees it."""
        before, self._sensors = self._sensors, {}
        for row in connection.execute(select(vouches)):
            vouched = before.get(row.sensor)
            if vouched is None or vouched.document != row.hosts:
                names: list[str] = load(row.hosts, list[str])
                vouched = _Vouched(row.hosts, names, {name: place for place, name in enumerate(names)})
            vouched.at, vouched.ages_ms = row.at, load(row.ages_ms, list[int])
            self._sensors[row.sensor] = vouched
        return self

    def at(self, host_id: str) -> float:
        """0.0 for a host that no sensor vouches for."""
        heard_at = 0.0
        for vouched in self._sensors.values():
            place = vouched.places.get(host_id)
            if place is not None and place < len(vouched.ages_ms):
                heard_at = max(heard_at, vouched.at - vouched.ages_ms[place] / 1000.0)
        return heard_at

    def all(self) -> dict[str, float]:
        """Of every host that a sensor vouches for."""
        heard: dict[str, float] = {}
        for vouched in self._sensors.values():
            for name, age_ms in zip(vouched.hosts, vouched.ages_ms, strict=False):
                at = vouched.at - age_ms / 1000.0
                if at > heard.get(name, 0.0):
                    heard[name] = at
        return heard
