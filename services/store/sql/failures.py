"""Translates failures of the database into errors with a cause and a next step."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError

from flyball.contracts.errors import ConfigurationError, FlyballError, StateVersionMismatch, StorageFull, Unreachable

# Kind of failure -> class, message with {name} and {cause}, hint.
_EXPLANATIONS: dict[str, tuple[type[FlyballError], str, str]] = {
    "full": (
        StorageFull,
        "The disk is full: nothing can be stored in {name}.",
        "free space there; nothing was stored in part",
    ),
    "locked": (
        Unreachable,
        "The database {name} gave up waiting for a lock.",
        "Flyball retries; if this persists, find the process or the long transaction that holds the lock",
    ),
    "refused": (
        ConfigurationError,
        "The database server refused {name}: {cause}.",
        "check user and password, and that the database exists: CREATE DATABASE name CHARACTER SET utf8mb4",
    ),
    "read_only": (
        ConfigurationError,
        "The database {name} cannot be opened for writing: {cause}.",
        "SQLite: check that the folder exists and belongs to you; MySQL: point the URL at the primary server",
    ),
    "not_primary": (
        Unreachable,
        "The database server of {name} takes no writes at present: {cause}.",
        "Flyball retries on a new connection; if this persists, point the URL at the primary server",
    ),
    "damaged": (
        StateVersionMismatch,
        "The file {name} is damaged, or not a database: {cause}.",
        "move it away, or restore it from a backup",
    ),
    "no_schema": (
        StateVersionMismatch,
        "The database {name} lacks tables of this release: {cause}.",
        "start the supervisor of this release once; it upgrades the schema",
    ),
    "away": (
        Unreachable,
        "The database {name} does not answer: {cause}.",
        "check that its server or disk works and is reachable",
    ),
}

_SQLITE_KINDS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CANTOPEN: "read_only",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_PERM: "read_only",
    sqlite3.SQLITE_NOTADB: "damaged",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_IOERR: "away",
}

_MYSQL_DEADLOCK = 1213
_MYSQL_NOT_PRIMARY = (1290, 1836)  # --read-only, and read-only mode: a server that was demoted, or is about to be
_MYSQL_KINDS = {
    **dict.fromkeys((1021, 1114, 3675), "full"),
    **dict.fromkeys((1205, _MYSQL_DEADLOCK), "locked"),
    **dict.fromkeys((1044, 1045, 1049, 1142, 1698, 4151), "refused"),
    **dict.fromkeys(_MYSQL_NOT_PRIMARY, "not_primary"),
    **dict.fromkeys((1036, 1792), "read_only"),
    **dict.fromkeys((1054, 1146), "no_schema"),
    **dict.fromkeys((0, 1040, 1042, 1043, 1053, 1927), "away"),  # 0: the driver's own "connection is closed"
}


def translate(error: DBAPIError, name: str) -> FlyballError | None:
    """Return the error for the user, None if only a bug of ours can cause it. `name`: the URL without its password."""
    cause = error.orig
    kind = _sqlite_kind(cause) if isinstance(cause, sqlite3.Error) else _mysql_kind(cause)
    if kind is None and error.connection_invalidated:
        kind = "away"
    if kind is None:
        return None
    error_class, message, hint = _EXPLANATIONS[kind]
    text = str(cause.args[-1]).rstrip(".") if cause is not None and cause.args else "no reason given"
    return error_class(message.format(name=name, cause=text), hint=hint)


def is_deadlock(error: BaseException | None) -> bool:
    """Return whether the server rolled a transaction back so that another could continue; it may run again."""
    return isinstance(error, DBAPIError) and _mysql_number(error.orig) == _MYSQL_DEADLOCK


def is_without_tables(error: DBAPIError) -> bool:
    """Return whether an SQLite file has no tables: it replaced the one whose schema was created."""
    return isinstance(error.orig, sqlite3.Error) and "no such table" in str(error.orig)


def is_not_primary(error: BaseException | None) -> bool:
    """Return whether the server takes no writes. Another one may have its address, but only for new connections."""
    return _mysql_number(error) in _MYSQL_NOT_PRIMARY


def _sqlite_kind(cause: sqlite3.Error) -> str | None:
    if "no such table" in str(cause) or "no such column" in str(cause):
        return "no_schema"
    return _SQLITE_KINDS.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)  # the low byte is the primary code


def _mysql_kind(cause: BaseException | None) -> str | None:
    number = _mysql_number(cause)
    return _MYSQL_KINDS.get(number, "away" if 2000 <= number < 3000 else None)  # 2000..2999: the client's own


def _mysql_number(cause: BaseException | None) -> int:
    number = cause.args[0] if cause is not None and cause.args else -1
    return number if isinstance(number, int) else -1
