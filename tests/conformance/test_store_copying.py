"""The documented command copies a whole database: as a backup, and from SQLite to a server."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from flyball.cli.main import run_cli
from flyball.contracts.errors import Conflict, StateVersionMismatch
from services.store.sql.copying import copy_database, count_rows
from services.store.sql.database import Database
from services.store.sql.tables import metadata, table_marks


def rows_of(db: Database) -> dict[str, list[tuple[object, ...]]]:
    with db.read() as connection:
        return {
            name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
            for name, table in metadata.tables.items()
            if table is not table_marks  # new with each transaction
        }


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_the_copy_is_the_same_to_the_last_row(stores, new_database_url, kind: str) -> None:  # type: ignore[no-untyped-def]
    stores.run_job()
    url = stores.db.url.render_as_string(hide_password=False)
    there = new_database_url(kind)
    assert run_cli(["db", "copy", url, there]) == 0
    copy = Database(there)
    assert rows_of(copy) == rows_of(stores.db)
    with pytest.raises(Conflict, match="not empty"):
        copy_database(stores.db, copy)
    assert rows_of(copy) == rows_of(stores.db)
    copy.close()


def test_a_copy_tells_of_all_its_rows(stores, new_database_url) -> None:  # type: ignore[no-untyped-def]
    stores.run_job()
    copy, told = Database(new_database_url("sqlite")), []
    expected = count_rows(stores.db)

    rows = copy_database(stores.db, copy, told.append)

    assert sum(told) == sum(rows.values()) == expected > 0
    copy.close()


def test_what_is_no_database_of_this_release_is_not_copied(new_database_url) -> None:  # type: ignore[no-untyped-def]
    empty, target = Database(new_database_url("sqlite")), Database(new_database_url("sqlite"))
    with pytest.raises(StateVersionMismatch, match="schema none"):
        copy_database(empty, target)
    empty.close()
    target.close()
