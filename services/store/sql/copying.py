"""Copies a whole database into an empty one: for a backup while the supervisor runs, and for the move to another
server. The copy is the same cluster; of the two only one may have a supervisor."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, insert, inspect, select, text

from flyball.contracts.errors import Conflict, StateVersionMismatch
from services.store.sql.database import Database
from services.store.sql.fresh_schema import newest_revision
from services.store.sql.schema_upgrade import migrate, refuse_from_before
from services.store.sql.tables import bus_streams, hosts, jobs, metadata

ROWS_AT_ONCE = 500


def copy_database(source: Database, target: Database) -> dict[str, int]:
    """Table -> rows that were copied, as of one moment; nothing is stored if it fails. Raises StateVersionMismatch if
    the source is not of this release, and Conflict if the target is in use."""
    with source.read() as connection:
        _check_source(connection, source.name)
        migrate(target)
        with target.write() as into:
            for table in (jobs, hosts, bus_streams):
                if into.scalar(select(func.count()).select_from(table)):
                    raise Conflict(
                        f"The database {target.name} is not empty: it has rows in {table.name}.",
                        hint="name a file that does not exist, or an empty database",
                    )
            for table in reversed(metadata.sorted_tables):
                into.execute(delete(table))
            return {table.name: _copy(connection, into, table.name) for table in metadata.sorted_tables}


def _check_source(connection: Connection, name: str) -> None:
    tables = inspect(connection).get_table_names()
    found = connection.scalar(text("SELECT version_num FROM alembic_version")) if "alembic_version" in tables else None
    refuse_from_before(name, found)
    if found != newest_revision():
        raise StateVersionMismatch(
            f"The database {name} has schema {found}; this release uses {newest_revision()}.",
            hint="start a supervisor of this release on it once, or copy it with the release that it is of",
        )


def _copy(connection: Connection, into: Connection, name: str) -> int:
    table, copied = metadata.tables[name], 0
    for rows in connection.execute(select(table).execution_options(yield_per=ROWS_AT_ONCE)).mappings().partitions():
        into.execute(insert(table), [dict(row) for row in rows])
        copied += len(rows)
    return copied
