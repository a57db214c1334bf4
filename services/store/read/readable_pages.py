"""Pages of lists of which rows may be unreadable: those are passed over, and the page is as long as if they were not
there. Who reads a list takes a page that is shorter than its limit for the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Column, Connection, Row, Select

from services.record.codec import number_of
from services.runtime.paging import MAX_LIMIT, Page
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import DISORDER_S, last_before

R = TypeVar("R")
T = TypeVar("T")


def readable_page(
    page: Page,
    rows_of: Callable[[Page], Sequence[R]],
    name_of: Callable[[R], str],
    items_of: Callable[[Sequence[R]], Sequence[T | None]],
) -> list[T]:
    """Return the items of a page, in the order of its rows, the newest last.

    `name_of`: what `Page.before` calls a row. `items_of`: the item of each row, None if it cannot be decoded."""
    wanted, found = page.limit, list[T]()
    while True:
        rows = rows_of(page)
        found = [item for item in items_of(rows) if item is not None] + found
        before = name_of(rows[0]) if rows else page.before
        if len(found) >= wanted or len(rows) < page.limit or before == page.before:
            return found[-wanted:]
        page = msgspec.structs.replace(page, before=before, limit=min(2 * page.limit, MAX_LIMIT))


def numbered_page(
    connection: Connection,
    query: Select[Any],
    number: Column[int],
    prefix: str,
    page: Page,
    *,
    items_of: Callable[[Sequence[Row[Any]]], Sequence[T | None]],
) -> list[T]:
    """Return a page of a list in the order of its numbers, whose rows are called `prefix`-number."""

    def rows_of(part: Page) -> list[Row[Any]]:
        wanted = query
        if part.before:
            wanted = wanted.where(number < number_of(part.before))
        if part.after:
            wanted = wanted.where(number > number_of(part.after))
        return list(connection.execute(wanted.order_by(number.desc()).limit(part.limit)).all()[::-1])

    return readable_page(page, rows_of, lambda row: f"{prefix}-{row.number}", items_of)


def each(table: str, prefix: str, make: Callable[[Row[Any]], T]) -> Callable[[Sequence[Row[Any]]], list[T | None]]:
    """For `numbered_page`: what makes the items of rows one by one."""
    return lambda rows: [readable(table, f"{prefix}-{row.number}", make, row) for row in rows]


def since(
    connection: Connection, query: Select[Any], number: Column[int], at: Column[float], moment_s: float
) -> Select[Any]:
    """Restrict a query to rows from a moment on (0.0: all). Their numbers are restricted as well, so that a page does
    not read the older rows to find that there are no more."""
    if not moment_s:
        return query
    return query.where(at >= moment_s, number > last_before(connection, number, at, moment_s - DISORDER_S))
