"""Insert or update in one statement, in the words of the dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, func
from sqlalchemy.dialects import mysql, sqlite


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    replace: Sequence[str] = (),
    maximum: Sequence[str] = (),
) -> None:
    """Insert rows; where a row of that primary key exists, set the columns `replace` to the new value and `maximum` to
    the larger of both, and leave the others as they were."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        insert = sqlite.insert(table)
        new = insert.excluded
        sets: dict[str, Any] = {name: new[name] for name in replace}
        sets |= {name: func.max(table.c[name], new[name]) for name in maximum}
        keys = list(table.primary_key.columns)
        statement: Any = (
            insert.on_conflict_do_update(index_elements=keys, set_=sets)
            if sets
            else insert.on_conflict_do_nothing(index_elements=keys)
        )
    else:
        insert_mysql = mysql.insert(table)
        fresh = insert_mysql.inserted
        key = next(iter(table.primary_key.columns))
        sets = {name: fresh[name] for name in replace}
        sets |= {name: func.greatest(table.c[name], fresh[name]) for name in maximum}
        statement = insert_mysql.on_duplicate_key_update(sets or {key.name: table.c[key.name]})
    connection.execute(statement, list(rows))
