"""The daemon's SQLite file: everything that must survive a kill -9.

One connection, used from its own thread, so that a slow disk never blocks the event loop. Every commit is on disk when
its call returns (WAL, synchronous=FULL).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from flyball.contracts.errors import ConfigurationError, FlyballError, StateVersionMismatch, StorageFull

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], object]  # part of a transaction

SCHEMA_VERSION = 1
MAX_BYTES = 256 << 20  # limit of the file, far above what the bounded tables need
_PAGE_BYTES = 4096

_SCHEMA = """
CREATE TABLE signals (
    incarnation TEXT NOT NULL, seq INTEGER NOT NULL, signal BLOB NOT NULL,
    PRIMARY KEY (incarnation, seq)
);
CREATE TABLE fences (job TEXT PRIMARY KEY, epoch INTEGER NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT, command_id TEXT NOT NULL UNIQUE, job TEXT NOT NULL,
    answer BLOB -- the newest CommandUpdate; NULL while there is none
);
CREATE TABLE jobs (job TEXT PRIMARY KEY, start BLOB NOT NULL); -- StartWorkers of the newest generation, with its fence
CREATE TABLE workers (
    job TEXT NOT NULL, generation INTEGER NOT NULL, rank INTEGER NOT NULL, -- rank -1: the generation's store
    pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL, -- field 22 of /proc/<pid>/stat
    spawned_at REAL NOT NULL, log_path TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, generation, rank)
);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class HostDatabase:
    """Opens or creates the file. Raises StateVersionMismatch if another version wrote it."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="daemon-database")
        try:
            self._connection = self._thread.submit(self._open, max_bytes).result()
        except sqlite3.Error as error:
            raise self._explain(error) from error

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction on the database's thread.

        Raises StorageFull if the disk has no room; nothing is stored then.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _open(self, max_bytes: int) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
        self.path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA max_page_count = {max_bytes // _PAGE_BYTES}")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif found != SCHEMA_VERSION:
            connection.close()
            raise StateVersionMismatch(
                f"{self.path} has version {found}; this release of Flyball uses {SCHEMA_VERSION}.",
                hint="run the release that wrote it, or choose another --state-dir; nothing was changed",
            )
        return connection

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return result

    def _explain(self, error: sqlite3.Error) -> FlyballError:
        # A full disk shows as FULL in the file itself and as IOERR when the WAL cannot grow.
        code = getattr(error, "sqlite_errorcode", None)  # the module's own errors have none
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE):
            return StorageFull(
                f"{self.path} cannot grow: {error}.", hint=f"free space on the disk of {self.path.parent}"
            )
        return ConfigurationError(
            f"{self.path} cannot be used: {error}.", hint="check the disk, or choose another --state-dir"
        )
