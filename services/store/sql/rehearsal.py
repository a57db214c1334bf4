"""Runs stores on a transaction that is undone at the end: all checks are real, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from services.store.sql.database import Database


class _Undone(Exception):
    pass


class _RehearsedDatabase(Database):
    """All reads and writes go through one connection, in one transaction."""

    def __init__(self, db: Database, connection: Connection) -> None:
        self.url, self.name, self.is_sqlite, self.make_schema = db.url, db.name, db.is_sqlite, None
        self._connection = connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        yield self._connection

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        del durable
        yield self._connection


@contextmanager
def rehearsal(db: Database) -> Iterator[Database]:
    """Lend a database whose changes are undone at the end of the block. Other writers wait meanwhile, on SQLite all."""
    try:
        with db.write(durable=False) as connection:
            yield _RehearsedDatabase(db, connection)
            raise _Undone
    except _Undone:
        pass
