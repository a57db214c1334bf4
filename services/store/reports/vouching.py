"""Stores which hosts each sensor received reports of, and when: one small document per sensor and interval, instead of
a row per host and report."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import Connection, delete, select, update

from services.record.codec import dump, load
from services.store.sql import events
from services.store.sql.rows import upsert
from services.store.sql.set_aside import readable
from services.store.sql.tables import vouches

FORGET_AFTER_S = 600.0  # rows of sensors that vouch no more: each start of a sensor has a row of its own


def write(
    connection: Connection, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None
) -> None:
    """Store when a sensor last received a report of each host: hosts[i] at `ages_ms[i]` before `at`. `hosts` None: the
    same hosts as last time."""
    mine = vouches.c.sensor == sensor
    if hosts is None:
        connection.execute(update(vouches).where(mine).values(at=at, ages_ms=dump(ages_ms)))
    else:
        row = {"sensor": sensor, "at": at, "hosts": dump(hosts), "ages_ms": dump(ages_ms)}
        upsert(connection, vouches, [row], replace=("at", "hosts", "ages_ms"))
        connection.execute(delete(vouches).where(vouches.c.at < at - FORGET_AFTER_S))
    events.append(connection, [])


def received_at(connection: Connection, host_ids: Collection[str] | None = None) -> dict[str, float]:
    """Return host -> when any sensor last received a report of it, for those of these hosts that sensors vouch for.
    None: all hosts."""
    newest: dict[str, float] = {}
    wanted = None if host_ids is None else frozenset(host_ids)
    for row in connection.execute(select(vouches)):
        hosts = readable("vouches", row.sensor, load, row.hosts, list[str]) or []
        ages_ms = readable("vouches", row.sensor, load, row.ages_ms, list[int]) or []
        for name, age_ms in zip(hosts, ages_ms, strict=False):
            if wanted is None or name in wanted:
                at = row.at - age_ms / 1000.0
                if at > newest.get(name, 0.0):
                    newest[name] = at
    return newest


class _Vouched(msgspec.Struct, gc=False):
    """The newest document of one sensor."""

    document: str
    places: dict[str, int]  # host -> index in `hosts`
    at: float = 0.0
    ages_ms: list[int] = []


class VouchedHosts:
    """When any sensor last received a report of a host. Keeps the decoded host lists, which rarely change. Belongs to
    one thread."""

    def __init__(self) -> None:
        self._sensors: dict[str, _Vouched] = {}

    def read(self, connection: Connection) -> VouchedHosts:
        """Load what this transaction sees."""
        before, self._sensors = self._sensors, {}
        for row in connection.execute(select(vouches)):
            vouched = before.get(row.sensor)
            if vouched is None or vouched.document != row.hosts:
                names = readable("vouches", row.sensor, load, row.hosts, list[str])
                if names is None:
                    continue
                vouched = _Vouched(row.hosts, {name: place for place, name in enumerate(names)})
            ages_ms = readable("vouches", row.sensor, load, row.ages_ms, list[int])
            vouched.at, vouched.ages_ms = row.at, ages_ms or []
            self._sensors[row.sensor] = vouched
        return self

    def received_at(self, host_id: str) -> float:
        """Return the time for one host, 0.0 if no sensor vouches for it."""
        newest = 0.0
        for vouched in self._sensors.values():
            place = vouched.places.get(host_id)
            if place is not None and place < len(vouched.ages_ms):
                newest = max(newest, vouched.at - vouched.ages_ms[place] / 1000.0)
        return newest
