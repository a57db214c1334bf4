"""Copies a whole database into an empty one: a backup while the supervisor runs, or a move to another server.

The copy is the same cluster. Only one of the two may have a supervisor.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, Table, delete, func, insert, select

from flyball.contracts.errors import Conflict
from services.store.sql import schema_upgrade
from services.store.sql.database import Database
from services.store.sql.tables import bus_streams, hosts, jobs, metadata

ROWS_AT_ONCE = 500
Advance = Callable[[int], None]  # is told of so many rows more


def count_rows(db: Database) -> int:
    """Return how many rows a copy has, about. Raises StateVersionMismatch if another release wrote the database."""
    with db.read() as connection:
        schema_upgrade.check(connection, db.name)
        return sum(connection.scalar(select(func.count()).select_from(t)) or 0 for t in metadata.sorted_tables)


def copy_database(source: Database, target: Database, advance: Advance = lambda _: None) -> dict[str, int]:
    """Copy all tables as of one moment. Return table -> number of rows. Stores nothing if it fails.

    Raises StateVersionMismatch if the source has another release's schema, Conflict if the target is in use.
    """
    with source.read() as connection:
        schema_upgrade.check(connection, source.name)
        schema_upgrade.migrate(target)
        with target.write() as into:
            for table in (jobs, hosts, bus_streams):
                if into.scalar(select(func.count()).select_from(table)):
                    raise Conflict(
                        f"The database {target.name} is not empty: it has rows in {table.name}.",
                        hint="name a file that does not exist, or an empty database",
                    )
            for table in reversed(metadata.sorted_tables):
                into.execute(delete(table))
            return {
                table.name: copy_table(connection, into, table, advance=advance) for table in metadata.sorted_tables
            }


def copy_table(
    source: Connection,
    target: Connection,
    table: Table,
    *,
    rows_at_once: int = ROWS_AT_ONCE,
    advance: Advance = lambda _: None,
) -> int:
    """Copy the rows of a table and return their number."""
    copied = 0
    found = source.execute(select(table).execution_options(yield_per=rows_at_once)).mappings()
    for rows in found.partitions():
        target.execute(insert(table), [dict(row) for row in rows])
        copied += len(rows)
        advance(len(rows))
    return copied
