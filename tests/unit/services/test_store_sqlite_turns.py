"""Processes that write to one SQLite file take turns: a waiting writer precedes one that has just written."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from support.clocks.waits import until

from flyball.contracts.errors import Unreachable
from services.store.sql.database import Database

DEADLINE_S = 60.0
WRITE_TWICE = """
import sys
from sqlalchemy import text
from services.store.sql import database
database.BUSY_TIMEOUT_S = 60.0
db = database.Database(sys.argv[1])
with db.write() as connection:
    connection.execute(text("INSERT INTO writes VALUES ('theirs')"))
    print("begun", flush=True)
    sys.stdin.readline()
with db.write() as connection:
    connection.execute(text("INSERT INTO writes VALUES ('theirs again')"))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flyball.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE writes (who TEXT)")
    connection.close()
    return path


@pytest.fixture
def db(file: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{file}", busy_timeout_s=DEADLINE_S)  # a delayed writer is no outage
    yield opened
    opened.close()


@contextmanager
def turn_held(file: Path) -> Iterator[None]:
    descriptor = os.open(f"{file}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_turn_held(file: Path) -> bool:
    descriptor = os.open(f"{file}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write(db: Database, who: str) -> None:
    with db.write() as connection:
        connection.execute(text("INSERT INTO writes VALUES (:who)"), {"who": who})


def written(db: Database) -> list[str]:
    with db.read() as connection:
        return list(connection.scalars(text("SELECT who FROM writes ORDER BY rowid")))


@pytest.mark.processes
def test_a_waiting_writer_precedes_the_next_write_of_the_present_one(file: Path, db: Database) -> None:
    command = [sys.executable, "-P", "-c", WRITE_TWICE, str(db.url)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdin is not None and other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            waiting = threading.Thread(target=write, args=(db, "ours"))
            waiting.start()
            until(lambda: is_turn_held(file), "nobody waits for the turn")
            other.stdin.write("go on\n")
            other.stdin.flush()
            waiting.join(DEADLINE_S)
            assert other.wait(DEADLINE_S) == 0
        finally:
            other.kill()
    assert written(db) == ["theirs", "ours", "theirs again"]


def test_a_turn_is_given_back_before_the_transaction_ends(file: Path, db: Database) -> None:
    with db.write():
        assert not is_turn_held(file)


def test_a_turn_that_is_never_given_back_delays_but_refuses_nothing(file: Path) -> None:
    db = Database(f"sqlite:///{file}", busy_timeout_s=0.05)
    with turn_held(file):
        write(db, "ours")
    assert written(db) == ["ours"]
    db.close()


def test_a_locked_database_is_an_error_and_the_turn_is_given_back(file: Path) -> None:
    db = Database(f"sqlite:///{file}", busy_timeout_s=0.05)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unreachable):
        write(db, "ours")
    other.close()
    assert not is_turn_held(file)
    db.close()


def test_without_a_file_for_turns_writes_go_on(file: Path, db: Database) -> None:
    Path(f"{file}-turn").mkdir()  # nobody can open it for writing
    write(db, "ours")
    assert written(db) == ["ours"]


def test_where_files_cannot_be_locked_writes_go_on(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write(db, "ours")
    assert written(db) == ["ours"]
