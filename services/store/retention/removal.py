"""Removes rows in transactions that are short, so that others can write between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, delete, select

from services.store.sql.database import Database

ROWS_AT_ONCE = 500  # in one transaction


def until_none(db: Database, remove: Callable[[Connection], int]) -> Iterator[int]:
    """Call `remove` in one transaction after the other until it finds nothing; yields how much each removed.

    The transactions need not reach the disk at once: what a power cut brings back is removed again.
    """
    while removed := db.transact(remove, durable=False):
        yield removed


def remove_where(db: Database, table: Table, *conditions: ColumnElement[bool]) -> Iterator[int]:
    """Remove all rows of a table that meet the conditions."""
    keys = list(table.primary_key.columns)
    if len(keys) == 1:
        query = select(keys[0]).where(*conditions).order_by(keys[0]).limit(ROWS_AT_ONCE)
        yield from until_none(db, partial(remove_found, table=table, query=query))
    else:  # rows of a job's ranks and steps: MySQL has no cheap way to name some of them
        yield db.transact(lambda connection: connection.execute(delete(table).where(*conditions)).rowcount)


def remove_found(connection: Connection, table: Table, query: Select[Any]) -> int:
    """Remove the rows whose primary keys a query finds. MySQL deletes none that the same statement reads."""
    return remove_keys(connection, table, connection.scalars(query).all())


def remove_keys(connection: Connection, table: Table, keys: Sequence[int | str]) -> int:
    """Remove the rows with these primary keys; returns how many they are."""
    (key,) = table.primary_key.columns
    for start in range(0, len(keys), ROWS_AT_ONCE):
        connection.execute(delete(table).where(key.in_(keys[start : start + ROWS_AT_ONCE])))
    return len(keys)
