"""How processes that write to one SQLite file take turns.

SQLite's lock has no queue: who waits looks again after pauses that grow to 0.1 s. Between the transactions of a process
that writes one after the other, which are microseconds apart, others waited for seconds, longer than a controller's
lease lasts. So there is a file beside the database that one locks while one waits to begin. As the next transaction of
whoever writes now needs that lock too, it cannot come before the one that has been waiting.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection

LOOK_MS = 1  # how often one that waits looks whether it may go on


def begin_immediate(connection: Connection, path: str, *, timeout_s: float) -> None:
    """Begin a transaction that writes to the database at `path`, in turn with other processes.

    Raises what SQLite's own BEGIN IMMEDIATE raises: that it is locked after `timeout_s`, or what else is wrong.
    """
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    deadline_s = time.monotonic() + timeout_s
    driver.execute(f"PRAGMA busy_timeout={LOOK_MS}").fetchall()
    try:
        with _turn(f"{path}-turn", deadline_s):
            while time.monotonic() < deadline_s:
                try:
                    driver.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.Error as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                        break
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # says what is wrong in the terms of all other statements
    finally:
        driver.execute(f"PRAGMA busy_timeout={int(timeout_s * 1000)}").fetchall()


@contextmanager
def _turn(path: str, deadline_s: float) -> Iterator[None]:
    """Hold the turn for the block. Go on without it after the deadline, and where there can be no such file or lock: it
    is SQLite's own lock that keeps the data right, and says what is wrong."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the kernel drops with its holder
                break
            except BlockingIOError:
                time.sleep(LOOK_MS / 1000)
            except OSError:
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it would leave the lock to a child forked meanwhile
        os.close(descriptor)
