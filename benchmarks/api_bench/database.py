"""Fills a database for the benchmark, and removes it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import Table, func, insert, inspect, select, text

from api_bench.rows import Rows, all_rows
from flyball.contracts.errors import Conflict
from services.store.sql import tables
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

ROWS_AT_ONCE = 5000
MARK = "api-benchmark"  # a cursor of this name: the database is ours, and complete


def prepare(db: Database, hosts: int, signals: int, *, keeps: bool) -> None:
    """Fill an empty database. One that an earlier run filled and kept is used as it is, after an upgrade. Raises
    Conflict for any other, because its tables would be dropped."""
    with db.read() as connection:
        is_empty = not inspect(connection).get_table_names()
    wanted = f"{hosts} hosts, {signals} signals"
    if is_empty:
        try:
            migrate(db)
            fill(db, all_rows(hosts, signals))
            with db.write() as connection:
                connection.execute(insert(tables.cursors).values(name=MARK, stream=wanted, position=0))
        except BaseException:  # Ctrl-C, or a full disk: nobody would take a half filled one for ours
            drop(db)
            raise
        return
    found = _filled(db)
    if found != wanted or not keeps:
        raise Conflict(
            f"The database {db.name} has {found or 'tables of something else'}.",
            hint="give an empty database, or --keep and the sizes of the run that filled it",
        )
    migrate(db)


def drop(db: Database) -> None:
    """Drop the tables."""
    with db.migration() as connection:
        tables.metadata.drop_all(connection)
        connection.execute(text("DROP TABLE IF EXISTS alembic_version"))


def _filled(db: Database) -> str | None:
    """Return what an earlier run filled a database with, None if that was no run of the benchmark."""
    with db.read() as connection:
        if not inspect(connection).has_table(tables.cursors.name):
            return None
        return connection.scalar(select(tables.cursors.c.stream).where(tables.cursors.c.name == MARK))


def fill(db: Database, of_tables: Sequence[tuple[Table, int, Rows]]) -> None:
    """Fill the empty tables of a migrated database."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        for table, count, rows in of_tables:
            task = progress.add_task(table.name, total=count)
            is_large = count > ROWS_AT_ONCE and table in (tables.signals, tables.events)
            if is_large:  # sorting all entries of an index at the end is quicker than looking for the place of each
                with db.migration() as connection:
                    for index in table.indexes:
                        index.drop(connection)
            while part := list(islice(rows, ROWS_AT_ONCE)):
                _insert(db, table, part)
                progress.advance(task, len(part))
            if is_large:
                with db.migration() as connection:
                    for index in sorted(table.indexes, key=lambda one: str(one.name)):
                        index.create(connection)
    with db.write() as connection:
        last = connection.scalar(select(func.max(tables.events.c.number))) or 0
        connection.execute(tables.log_head.update().values(last_event=last, revision=last))


def _insert(db: Database, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows through the driver: SQLAlchemy looks at each value of them."""
    names = list(rows[0])
    mark = "?" if db.is_sqlite else "%s"
    statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join([mark] * len(names))})"
    with db.write(durable=False) as connection:
        connection.exec_driver_sql(statement, [tuple(row.values()) for row in rows])
