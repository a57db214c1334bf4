"""Every failure of a database names its cause and the next step, and never a password."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError, OperationalError

from flyball.contracts.errors import ConfigurationError, FlyballError, StateVersionMismatch, StorageFull, Unreachable
from services.runtime.outages import OUTAGES
from services.store.sql.database import Database
from services.store.sql.failures import translate
from services.store.sql.schema_upgrade import migrate
from services.store.sql.tables import bus_messages, log_head


def failure(url: str) -> FlyballError:
    db = Database(url)
    try:
        with pytest.raises(FlyballError) as caught:
            migrate(db)
    finally:
        db.close()
    assert caught.value.hint
    assert "secret" not in str(caught.value)
    return caught.value


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path / 'flyball.sqlite'}")
    migrate(opened)
    yield opened
    opened.close()


@pytest.mark.parametrize("url", ["", "nonsense", "postgresql://u:secret@h/d", "sqlite://", "mysql://root:secret@h"])
def test_a_url_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Database(url)
    assert "secret" not in str(caught.value)
    assert caught.value.hint


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert isinstance(failure(f"sqlite:///{tmp_path / 'nowhere' / 'x.sqlite'}"), ConfigurationError)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"these are not the bytes of a database " * 100)
    assert isinstance(failure(f"sqlite:///{tmp_path / 'x.sqlite'}"), StateVersionMismatch)


def test_a_server_that_is_not_there() -> None:
    assert isinstance(failure("mysql://root:secret@127.0.0.1:9/flyball"), Unreachable)


def test_a_full_disk_stores_nothing_and_is_usable_again(db: Database) -> None:
    with db.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(StorageFull) as caught, db.write() as connection:
        connection.execute(insert(bus_messages), [{"position": n, "document": "x" * 4000} for n in range(50)])
    assert "free space" in caught.value.hint
    assert db.write_problem is caught.value
    with db.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=1000000")
        assert connection.execute(select(bus_messages)).all() == []
        connection.execute(insert(bus_messages).values(position=1, document="x"))
    assert db.write_problem is None


@pytest.fixture
def impatient(db: Database, tmp_path: Path) -> Iterator[Database]:
    """Waits for no lock, in the file of `db`."""
    opened = Database(f"sqlite:///{tmp_path / 'flyball.sqlite'}", busy_timeout_s=0.05)
    yield opened
    opened.close()


def test_another_process_that_keeps_the_database_locked(impatient: Database, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "flyball.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(Unreachable), impatient.write():
            raise AssertionError("the lock is another's")
        with impatient.read() as connection:  # reads go on meanwhile
            assert connection.execute(select(log_head)).all()
    finally:
        other.close()


def test_another_thread_that_keeps_the_database_locked(impatient: Database) -> None:
    outcome: list[type[BaseException]] = []

    def write() -> None:
        try:
            with impatient.write():
                raise AssertionError("the lock is another's")
        except Unreachable as error:
            outcome.append(type(error))

    with impatient.write():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(60.0)
    assert outcome == [Unreachable]


def test_reading_cannot_write(db: Database) -> None:
    with pytest.raises(ConfigurationError), db.read() as connection:
        connection.execute(insert(bus_messages).values(position=1, document="x"))


def test_an_error_does_not_show_the_values(db: Database) -> None:
    row = insert(bus_messages).values(position=1, document="a secret of a job's environment")
    with pytest.raises(IntegrityError) as caught:
        for _ in range(2):
            with db.write() as connection:
                connection.execute(row)
    assert "secret" not in str(caught.value)


def test_a_commit_waits_for_the_disk_unless_it_need_not_be_durable(db: Database) -> None:
    for durable, level in ((True, 2), (False, 1), (True, 2)):
        with db.write(durable=durable) as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == level


@pytest.mark.parametrize("number", [1290, 1836, 1045, 1040, 1053, 2006, 2013])
def test_errors_of_a_server_in_a_failover_are_waited_out(number: int) -> None:
    error = translate(OperationalError("UPDATE jobs", {}, Exception(number, "read-only, or gone")), "mysql://h/d")
    assert isinstance(error, OUTAGES)
    assert isinstance(error, Unreachable) is (number != 1045)
