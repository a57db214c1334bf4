"""Rows that cannot be decoded: each is set aside and named, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TypeVar

import msgspec
import structlog

from flyball.contracts.errors import Conflict, NotFound
from services.controller.round.view import UnreadableRow

R = TypeVar("R")
T = TypeVar("T")

# Not the errors of an outage: those pass.
UNREADABLE = (msgspec.MsgspecError, NotFound, ValueError, TypeError, KeyError, ArithmeticError, RecursionError)
RESTORE = "find out who changed the database; restore the row from a backup"  # the hint
MAX_REASON_CHARS = 300
MAX_REMEMBERED = 10_000
_log = structlog.get_logger(__name__)
_logged: set[tuple[str, str]] = set()


class SetAside:
    """The rows that one reader set aside."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], UnreadableRow] = {}

    @property
    def rows(self) -> tuple[UnreadableRow, ...]:
        return tuple(self.found[key] for key in sorted(self.found))


_present: ContextVar[SetAside | None] = ContextVar("set_aside", default=None)


@contextmanager
def setting_aside() -> Iterator[SetAside]:
    """Collect what `readable` sets aside meanwhile."""
    aside = SetAside()
    token = _present.set(aside)
    try:
        yield aside
    finally:
        _present.reset(token)


def aside_so_far() -> int:
    """How many rows were set aside by now: who caches what it reads must read those again."""
    aside = _present.get()
    return len(aside.found) if aside is not None else 0


def worded(table: str, rows: Iterable[R], key: str, **words: type[Enum]) -> list[R]:
    """Return the rows whose columns have values of these enums. Others are set aside. `key` names a row by one of its
    columns, as "act-{number}" does."""
    found = []
    for row in rows:
        name = key.format_map(_Columns(row))
        if readable(table, name, _check_words, row, words) is not None:
            found.append(row)
    return found


class _Columns:
    def __init__(self, row: object) -> None:
        self._row = row

    def __getitem__(self, column: str) -> object:
        return getattr(self._row, column)


def _check_words(row: object, words: Mapping[str, type[Enum]]) -> bool:
    for column, kind in words.items():
        kind(getattr(row, column))
    return True


def readable(table: str, key: object, make: Callable[..., T], *given: object, job: str = "") -> T | None:
    """Return what `make` makes of a row's values, or None if it cannot be decoded: then the row is set aside, and is
    logged once.

    `key` names the row, `job` the job that it is about."""
    try:
        return make(*given)
    except UNREADABLE as error:
        name = str(key)[:200]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
        aside = _present.get()
        if aside is not None:
            aside.found[table, name] = UnreadableRow(table, name, reason, job)
        if (table, name) not in _logged:
            if len(_logged) >= MAX_REMEMBERED:
                _logged.clear()
            _logged.add((table, name))
            _log.error("row_unreadable", table=table, row=name, why=reason)
        return None


def needed(table: str, key: object, make: Callable[..., T], *given: object) -> T:
    """As `readable`, for what cannot go on without the row. Raises Conflict if it cannot be decoded."""
    with setting_aside() as aside:
        found = readable(table, key, make, *given)
    if found is None:
        (row,) = aside.rows
        raise Conflict(f"{row.key} of {row.table} cannot be read ({row.reason}).", hint=RESTORE)
    return found
