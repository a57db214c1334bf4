"""Databases for the conformance suites: each test runs on SQLite and on a MariaDB or MySQL server, and shares its
database with no other test that runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pymysql
import pytest
from sqlalchemy import event
from support.clocks.manual import ManualClock
from support.stores.job_stores import MemoryStores, Stores
from support.stores.made_values import Make
from support.stores.ready_databases import SERVER, ReadyDatabases, mariadb_url

from services.bus import redis_client
from services.store.sql import database as database_module
from services.store.sql import lease
from services.store.sql.database import Database
from simulator.ports.memory import Memory


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a busy machine holds up for seconds is not away. Tests of what clients do then set their own."""
    monkeypatch.setattr(redis_client, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(database_module, "ANSWER_TIMEOUT_S", 120.0)


@pytest.fixture(autouse=True)
def plain_command_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are called what their drafts are."""
    monkeypatch.setattr(lease, "new_incarnation", lambda: "")
    monkeypatch.setattr(Memory, "new_incarnation", lambda _: "")


@pytest.fixture
def new_database_url(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Makes an empty database of a kind, "sqlite" or "mariadb", at every call; its URL."""
    with ExitStack() as stack:

        def new(kind: str) -> str:
            name = f"flyball_test_{uuid.uuid4().hex[:12]}"
            if kind == "sqlite":
                return f"sqlite:///{tmp_path / name}.sqlite"
            try:
                server = pymysql.connect(**SERVER)
            except pymysql.err.OperationalError as error:
                pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
            cursor = stack.enter_context(stack.enter_context(server).cursor())
            cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
            stack.callback(cursor.execute, f"DROP DATABASE {name}")
            return mariadb_url(name)

        yield new


@pytest.fixture(scope="session")
def ready_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadyDatabases]:
    databases = ReadyDatabases(tmp_path_factory.mktemp("databases"))
    yield databases
    databases.close()


@pytest.fixture
def new_ready_url(tmp_path: Path, ready_databases: ReadyDatabases) -> Iterator[Callable[[str], str]]:
    """At every call, the URL of another database of a kind, "sqlite" or "mariadb", with its schema and no rows."""
    with ExitStack() as stack:

        def new(kind: str) -> str:
            if kind == "sqlite":
                return ready_databases.sqlite(tmp_path / f"{uuid.uuid4().hex[:12]}.sqlite")
            try:
                name = ready_databases.mariadb()
            except pymysql.err.OperationalError as error:
                pytest.skip(f"no MySQL or MariaDB server at 127.0.0.1:3306 ({error})")
            stack.callback(ready_databases.give_back, name)
            return mariadb_url(name)

        yield new


@pytest.fixture(params=["sqlite", "mariadb"])
def database_url(request: pytest.FixtureRequest, new_database_url: Callable[[str], str]) -> str:
    """The URL of an empty database."""
    return new_database_url(request.param)


@pytest.fixture(params=["sqlite", "mariadb"])
def ready_url(request: pytest.FixtureRequest, new_ready_url: Callable[[str], str]) -> str:
    """The URL of `db`."""
    return new_ready_url(request.param)


@pytest.fixture
def db(ready_url: str) -> Iterator[Database]:
    """A database with its schema, and no rows."""
    database = Database(ready_url)
    yield database
    database.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def sql_stores(db: Database, clock: ManualClock, make: Make) -> Stores:
    return Stores(db, clock, make)


@pytest.fixture
def stores(sql_stores: Stores) -> Stores:
    """A suite of the ports takes `port_stores` instead."""
    return sql_stores


@pytest.fixture
def statements(sql_stores) -> Iterator[list[str]]:
    """The statements that the database received, in order."""
    found: list[str] = []

    def note(_connection, _cursor, statement: str, *_more) -> None:
        found.append(statement)

    with sql_stores.db.write() as writing, sql_stores.db.read() as reading:
        engines = {writing.engine, reading.engine}
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    yield found
    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)


@pytest.fixture(params=["sqlite", "mariadb", "memory"])
def port_stores(
    request: pytest.FixtureRequest, new_ready_url: Callable[[str], str], clock: ManualClock, make: Make
) -> Iterator[Stores]:
    """Of every implementation of the ports."""
    if request.param == "memory":
        yield MemoryStores(clock, make)
        return
    database = Database(new_ready_url(request.param))
    yield Stores(database, clock, make)
    database.close()


@pytest.fixture
def new_stores(new_ready_url: Callable[[str], str], make: Make) -> Iterator[Callable[[], Stores]]:
    """Makes stores of a new SQLite database at every call, for properties that are tried many times."""
    opened: list[Database] = []

    def new() -> Stores:
        opened.append(Database(new_ready_url("sqlite")))
        return Stores(opened[-1], ManualClock(), make)

    yield new
    for database in opened:
        database.close()
