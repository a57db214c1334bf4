"""Keeps the results of statements until a table that they read changes.

Every transaction that writes a kept table gives it a new mark, at its commit (`Database.write`). A snapshot in which a
table has the mark of an earlier one has the same rows. So a result may be used again without a look at the table.
Somebody who changes rows by hand leaves the marks alone: who keeps results must now and then read anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias, cast

import msgspec
from sqlalchemy import Connection, FrozenResult, Result, ScalarResult, Select, Table, event, select
from sqlalchemy import Engine as SqlEngine
from sqlalchemy.sql import visitors
from sqlalchemy.sql.dml import UpdateBase

from services.controller.ports import BrokenOff
from services.store.sql import tables
from services.store.sql.rows import new_version, upsert
from services.store.sql.tables import jobs, table_marks

MAX_KEPT = 2_000  # results
KEPT_TABLES = frozenset(
    table.name
    for table in (
        *(tables.lease, tables.cluster, tables.standings, tables.orders, tables.drains, tables.jobs),
        *(tables.generations, tables.job_failures, tables.ranks, tables.incidents, tables.decisions, tables.actions),
        *(tables.commands, tables.host_checks, tables.host_conditions, tables.vouches),
        *(tables.persistent_steps, tables.persistent_copies),
    )
)
# What reports change in `jobs`, with a mark of its own: whatever else is in there changes seldom.
PROGRESS = "jobs.progress"
_PROGRESS = frozenset(column.name for column in (jobs.c.newest_step, jobs.c.loss, jobs.c.loss_step))
OF_PROGRESS = {"flyball_mark": PROGRESS}  # the execution options of an update of these columns alone
HEAD = tables.log_head.name
_WRITTEN = "flyball_written"

Marks: TypeAlias = Mapping[str, int]
_Key: TypeAlias = tuple[Any, ...]


class _KeptResult(msgspec.Struct, frozen=True):
    marks: tuple[int, ...]  # of the tables that it reads, in the order of their names
    result: FrozenResult[Any]


class KeptReads:
    """Belongs to one thread. In a transaction it takes the place of the connection, for reading."""

    def __init__(self) -> None:
        self._kept: dict[_Key, _KeptResult] = {}
        self._tables: dict[Any, tuple[str, ...] | None] = {}  # by structure of a statement; None: it is never kept
        self._marks: Marks = {}
        self._connection: Connection | None = None
        self._yields: Callable[[], bool] | None = None

    def begin(
        self, connection: Connection, *, anew: bool = True, yields: Callable[[], bool] | None = None
    ) -> Connection:
        """Return what reads this transaction's state; `anew`: without earlier results. `yields`: asked before each
        statement; if it says so, the statement raises BrokenOff."""
        self._yields = yields
        if anew or len(self._kept) > MAX_KEPT:
            self._kept.clear()
        self._connection = connection
        # Every transaction writes the log's head. It is read once in each.
        self._marks = {name: mark for name, mark in connection.execute(select(table_marks))} | {HEAD: new_version()}
        return cast("Connection", self)  # it has what readers use of one

    def execute(self, statement: Any, parameters: Any = None) -> Result[Any]:  # noqa: ANN401 - as the connection's
        """As the connection's."""
        assert self._connection is not None
        if self._yields is not None and self._yields():
            raise BrokenOff
        found = _key_of(statement) if parameters is None and isinstance(statement, Select) else None
        if found is None:
            return self._connection.execute(statement, parameters)
        structure, values = found
        tables = self._tables_of(statement, structure)
        if tables is None:
            return self._connection.execute(statement)
        marks = tuple(self._marks.get(name, 0) for name in tables)
        kept = self._kept.get((structure, values))
        if kept is None or kept.marks != marks:
            kept = self._kept[structure, values] = _KeptResult(marks, self._connection.execute(statement).freeze())
        return kept.result()

    def scalars(self, statement: Any) -> ScalarResult[Any]:  # noqa: ANN401
        """As the connection's."""
        return self.execute(statement).scalars()

    def scalar(self, statement: Any) -> Any:  # noqa: ANN401
        """As the connection's."""
        return self.execute(statement).scalar()

    def _tables_of(self, statement: Select[Any], structure: object) -> tuple[str, ...] | None:
        if structure not in self._tables:
            names = set(_read_by(statement))
            self._tables[structure] = tuple(sorted(names)) if names <= {*KEPT_TABLES, PROGRESS, HEAD} else None
        return self._tables[structure]


def _key_of(statement: Select[Any]) -> tuple[Any, _Key] | None:
    """Return a statement's structure, and the values in it."""
    key = statement._generate_cache_key()
    if key is None:
        return None
    values = (bound.effective_value for bound in key.bindparams)
    return key.key, tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _read_by(statement: Select[Any]) -> Iterator[str]:
    """Yield the names of the tables that a statement reads, and PROGRESS for what reports change in `jobs`."""
    for part in visitors.iterate(statement):
        if isinstance(part, Table):
            yield part.name
            if part is jobs and any(column.name in _PROGRESS for column in statement.selected_columns):
                yield PROGRESS


# --- marks -----------------------------------------------------------------------------------------------------------


def note_writes(engine: SqlEngine) -> None:
    """Have an engine's connections note which kept tables they write."""

    def begun(connection: Connection) -> None:
        connection.info[_WRITTEN] = set()

    def executed(connection: Connection, statement: object, *_: object) -> None:
        if isinstance(statement, UpdateBase):
            table = statement.table
            name = statement.get_execution_options().get("flyball_mark") or getattr(table, "name", "")
            connection.info[_WRITTEN].add(name)

    event.listen(engine, "begin", begun)
    event.listen(engine, "after_execute", executed)


def mark_written(connection: Connection) -> None:
    """Give the tables that this transaction wrote new marks, as its last act: whoever writes one of them waits."""
    written: Collection[str] = connection.info[_WRITTEN] & {*KEPT_TABLES, PROGRESS}
    rows = [{"name": name, "mark": new_version()} for name in sorted(written)]
    upsert(connection, table_marks, rows, replace=("mark",))
