"""A daemon's database on a disk that may be full."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from flyball.contracts.errors import StorageFull
from host_daemon.store.database import HostDatabase

T = TypeVar("T")


class SmallDatabase(HostDatabase):
    """Refuses every change while it is full, as SQLite does."""

    is_full = False

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def checked(connection: sqlite3.Connection) -> T:
            before = connection.total_changes
            result = work(connection)
            if self.is_full and connection.total_changes != before:
                raise StorageFull("It cannot grow.")
            return result

        return await super().run(checked)
