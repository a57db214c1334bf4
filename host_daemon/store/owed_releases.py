"""Jobs whose memory the engine is still to free: they ended while it was away, or the daemon was killed before it had
asked."""

from __future__ import annotations

import sqlite3

import msgspec

from flyball.contracts import wire
from flyball.contracts.on_host.engine_wire import Release
from host_daemon.store.database import HostDatabase

_PREFIX = "release:"  # of the names in the table `facts`; the job follows


class OwedReleases:
    """Remembered before the engine is asked, until it has answered."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database

    async def load(self) -> list[Release]:
        """All of them."""

        def work(connection: sqlite3.Connection) -> list[Release]:
            rows = connection.execute("SELECT value FROM facts WHERE substr(name, 1, ?) = ?", (len(_PREFIX), _PREFIX))
            return [wire.decoder_of(Release).decode(value) for (value,) in rows]

        return await self._database.run(work)

    async def add(self, request: Release) -> None:
        """The engine is to be asked this, until it has answered."""
        value = msgspec.json.encode(request).decode()
        await self._database.run(
            lambda c: c.execute(
                "INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (_PREFIX + request.job, value)
            )
        )

    async def remove(self, request: Release) -> None:
        """It has answered."""
        await self._database.run(lambda c: c.execute("DELETE FROM facts WHERE name = ?", (_PREFIX + request.job,)))
