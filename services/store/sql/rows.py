"""Writing rows: insert-or-update statements, and version marks."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Insert, Table, func
from sqlalchemy.dialects import mysql, sqlite

_marks = random.Random(secrets.randbits(256))  # a system call for each mark would release the interpreter lock


def new_version() -> int:
    """Return a version mark that no row had before; it fits a signed BIGINT.

    A reader that keeps a row checks by its mark whether the row changed. Marks are random, not counted: a writer need
    not read the row first, and a row that is deleted and inserted again does not repeat an earlier mark.
    """
    return _marks.getrandbits(63)


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    replace: tuple[str, ...] = (),
    maximum: tuple[str, ...] = (),
) -> None:
    """Insert rows. If a row with that primary key exists, set the columns `replace` to the new value and `maximum` to
    the larger of both; keep the others."""
    if rows:
        connection.execute(_statement(table, replace, maximum, connection.dialect.name == "sqlite"), list(rows))


@lru_cache(maxsize=128)  # building a statement takes longer than running it
def _statement(table: Table, replace: tuple[str, ...], maximum: tuple[str, ...], is_sqlite: bool) -> Insert:
    keys = list(table.primary_key.columns)
    if is_sqlite:
        insert = sqlite.insert(table)
        new = insert.excluded
        sets: dict[str, Any] = {name: new[name] for name in replace}
        sets |= {name: func.max(table.c[name], new[name]) for name in maximum}
        if not sets:
            return insert.on_conflict_do_nothing(index_elements=keys)
        return insert.on_conflict_do_update(index_elements=keys, set_=sets)
    insert_mysql = mysql.insert(table)
    fresh = insert_mysql.inserted
    sets = {name: fresh[name] for name in replace}
    sets |= {name: func.greatest(table.c[name], fresh[name]) for name in maximum}
    return insert_mysql.on_duplicate_key_update(sets or {keys[0].name: table.c[keys[0].name]})
