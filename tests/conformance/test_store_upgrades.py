"""A database of the first release goes through every later revision, and keeps its rows. An older one is refused."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, inspect, text

from flyball.cli.main import run_cli
from flyball.contracts.errors import StateVersionMismatch
from services.store.sql.copying import copy_database
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import MIGRATIONS, check, migrate
from services.store.sql.tables import metadata

FIRST_RELEASE = "0200"

Rows = dict[str, list[dict[str, object]]]


def _upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _tables(connection: Connection) -> MetaData:
    """The tables as they are in this database, whatever the code says."""
    tables = MetaData()
    tables.reflect(connection, only=lambda name, _: name != "alembic_version")
    return tables


def _rows(connection: Connection, table: str) -> list[dict[str, object]]:
    return [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]


def _one_of_each(connection: Connection) -> None:
    """Insert one row into every table."""
    values = {int: 7, float: 7.5, Decimal: 7.5, str: "7", bytes: b"7", bool: True}
    for table in _tables(connection).sorted_tables:
        connection.execute(table.insert().values({c.name: values[c.type.python_type] for c in table.columns}))


def test_a_database_of_the_first_release_keeps_its_rows(database_url: str) -> None:
    """A revision that renames or drops a column must state here what becomes of it."""
    db = Database(database_url)
    with db.migration() as connection:
        _upgrade(connection, FIRST_RELEASE)
        _one_of_each(connection)
        before: Rows = {name: _rows(connection, name) for name in _tables(connection).tables}
    migrate(db)
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        for name, rows in before.items():
            now = _rows(connection, name)
            assert [{key: row[key] for key in old} for row, old in zip(now, rows, strict=True)] == rows, name
    db.close()


@pytest.mark.processes
def test_tables_of_another_program_are_refused_and_unchanged(new_database_url: Callable[[str], str]) -> None:
    """Only a creation that was killed leaves tables without a revision, and it leaves whole ones."""
    db = Database(new_database_url("mariadb"))
    with db.migration() as connection:
        connection.execute(text("CREATE TABLE jobs (job VARCHAR(64) PRIMARY KEY, spec TEXT)"))
    with pytest.raises(StateVersionMismatch, match="table jobs without the columns state, message") as caught:
        migrate(db)
    assert "use an empty database" in caught.value.hint
    with db.read() as connection:
        assert set(inspect(connection).get_table_names()) <= {"jobs", "alembic_version"}
    db.close()


def _check(db: Database) -> None:
    with db.read() as connection:
        check(connection, db.name)


@pytest.fixture(params=["0015", "0111"])
def from_before(db: Database, request: pytest.FixtureRequest) -> Database:
    """A database from before the first release."""
    with db.migration() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :old"), {"old": request.param})
    return db


@pytest.mark.parametrize("use", ["start", "read", "copy"])
def test_a_database_from_before_the_first_release_is_refused_with_the_next_step(
    from_before: Database, new_database_url: Callable[[str], str], use: str
) -> None:
    target = Database(new_database_url("sqlite"))
    uses: dict[str, Callable[[], object]] = {
        "start": lambda: migrate(from_before),
        "read": lambda: _check(from_before),
        "copy": lambda: copy_database(from_before, target),
    }
    with pytest.raises(StateVersionMismatch, match=r"has schema 0\d+, from before the first release") as caught:
        uses[use]()
    assert "start with an empty database" in caught.value.hint
    target.close()


def test_a_command_says_so_in_two_lines(
    from_before: Database, new_database_url: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = from_before.url.render_as_string(hide_password=False)
    assert run_cli(["db", "copy", url, new_database_url("sqlite")]) == 5
    printed = capsys.readouterr().err
    assert "from before the first release" in printed and "empty database" in printed and "Traceback" not in printed
