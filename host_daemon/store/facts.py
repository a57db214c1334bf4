"""Stores what the daemon remembers by name: small facts, and the memory that the engine has yet to free."""

from __future__ import annotations

import sqlite3

import msgspec

from flyball.contracts import wire
from flyball.contracts.on_host.engine_wire import Release
from host_daemon.store.database import HostDatabase, Work

_RELEASE_PREFIX = "release:"  # of a fact's name; the job follows


class Facts:
    """Text values by name."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database

    async def get(self, name: str) -> str | None:
        row = await self._database.run(
            lambda c: c.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        )
        return row[0] if row else None

    async def set(self, name: str, value: str) -> None:
        await self._database.run(self.setting(name, value))

    async def remove(self, name: str) -> None:
        await self._database.run(lambda c: c.execute("DELETE FROM facts WHERE name = ?", (name,)))

    @staticmethod
    def setting(name: str, value: str) -> Work:
        """`set`, for a transaction that also does something else."""
        return lambda connection: connection.execute(
            "INSERT INTO facts (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )


class OwedReleases:
    """Jobs whose memory the engine must still free. Each is stored before the engine is asked, and removed once it has
    replied: the engine may be away, and the daemon may be killed in between."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database
        self._facts = Facts(database)

    async def load(self) -> list[Release]:
        def work(connection: sqlite3.Connection) -> list[Release]:
            rows = connection.execute(
                "SELECT value FROM facts WHERE substr(name, 1, ?) = ?", (len(_RELEASE_PREFIX), _RELEASE_PREFIX)
            )
            return [wire.decoder_of(Release).decode(value) for (value,) in rows]

        return await self._database.run(work)

    async def add(self, request: Release) -> None:
        """Raises StorageFull if there is no room for it."""
        await self._facts.set(_RELEASE_PREFIX + request.job, msgspec.json.encode(request).decode())

    async def remove(self, request: Release) -> None:
        """Raises StorageFull if it was there and there is no room to remove it."""
        await self._facts.remove(_RELEASE_PREFIX + request.job)
