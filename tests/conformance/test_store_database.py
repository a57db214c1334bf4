"""Connections, transactions and migrations mean the same on SQLite and on MySQL or MariaDB."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, inspect, select, text, update
from sqlalchemy.schema import CreateTable
from support.clocks.waits import until

from flyball.contracts.errors import StateVersionMismatch, Unreachable
from services.store.sql import database, schema_upgrade
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate
from services.store.sql.tables import bus_streams, cluster, log_head, metadata

DEADLINE_S = 120.0
# With timeouts as long as the tests': the others wait for a process that is held up in the middle.
MIGRATE = """
import sys
from services.store.sql import database, schema_upgrade
database.BUSY_TIMEOUT_S = database.CONNECT_TIMEOUT_S = 60.0
schema_upgrade.migrate(database.Database(sys.argv[1]))
"""


WRITE_ON_AND_ON = """
import sys, time
from sqlalchemy import text
from services.store.sql.database import Database
db = Database(sys.argv[1])
print("begun", flush=True)
while True:
    with db.write(durable=False) as connection:
        connection.execute(text("UPDATE log_head SET revision = revision + 1"))
        time.sleep(0.01)  # work that takes so long
"""


def test_the_migrated_schema_is_the_one_that_the_code_uses(db: Database) -> None:
    with db.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


@pytest.mark.processes
def test_a_server_database_created_at_once_equals_a_migrated_one(
    new_database_url: Callable[[str], str],
) -> None:
    """Compares defaults, keys and collations to the letter, in any order: a later revision adds columns at the end."""
    migrated, made = (Database(new_database_url("mariadb")) for _ in range(2))
    with migrated.migration() as connection:
        schema_upgrade.upgrade(connection, migrated.name)
    with made.migration() as connection:
        schema_upgrade.create(connection)
    with migrated.read() as one, made.read() as other:
        for table in metadata.tables:
            assert _created(one, table) == _created(other, table), table
        assert set(inspect(one).get_table_names()) == {*metadata.tables, "alembic_version"}
        for table in (*metadata.tables, "alembic_version"):
            if table != "cluster":  # each has its own id
                rows = text(f"SELECT * FROM {table}")
                assert one.execute(rows).all() == other.execute(rows).all(), table
    migrate(made)  # is recognized as the newest
    migrated.close()
    made.close()


def _created(connection: Connection, table: str) -> list[str]:
    statement = str(connection.execute(text(f"SHOW CREATE TABLE {table}")).one()[1])
    return sorted(line.rstrip(",") for line in statement.splitlines())


def _described(connection: Connection) -> dict[str, object]:
    """The complete schema of an SQLite database, and its rows."""
    found: dict[str, object] = {}
    for table in inspect(connection).get_table_names():
        for pragma in ("table_xinfo", "foreign_key_list", "index_list"):
            rows = connection.execute(text(f"PRAGMA {pragma}({table})")).all()
            # By name, because their order is that of the revisions; the first number of each row counts them.
            found[f"{pragma} {table}"] = sorted(tuple(map(str, row[1:])) for row in rows)
        for index in connection.execute(text(f"PRAGMA index_list({table})")).all():
            rows = connection.execute(text(f"PRAGMA index_xinfo({index.name})")).all()
            found[f"index {index.name}"] = [(row.seqno, row.name, row.desc, row.coll, row.key) for row in rows]
        if table != "cluster":  # each has its own id
            found[f"rows {table}"] = [tuple(row) for row in connection.execute(text(f"SELECT * FROM {table}"))]
    return found


def test_an_sqlite_file_created_at_once_equals_a_migrated_one(tmp_path: Path) -> None:
    made, migrated = (Database(f"sqlite:///{tmp_path / name}.sqlite") for name in ("made", "migrated"))
    with made.migration() as connection:
        schema_upgrade.create(connection)
    with migrated.migration() as connection:
        schema_upgrade.upgrade(connection, migrated.name)
    with made.read() as one, migrated.read() as other:
        assert _described(one) == _described(other)
        assert MigrationContext.configure(one).get_current_revision() == schema_upgrade.revisions()[-1]
        assert compare_metadata(MigrationContext.configure(one, opts={"compare_type": True}), metadata) == []
    for db in (made, migrated):
        migrate(db)  # both are recognized as the newest
        db.close()


@pytest.mark.processes
def test_a_fresh_sqlite_file_needs_no_alembic(tmp_path: Path) -> None:
    program = f"{MIGRATE}\nassert not any(name.startswith('alembic') for name in sys.modules)"
    url = f"sqlite:///{tmp_path / 'flyball.sqlite'}"
    for _ in ("new", "there already"):
        subprocess.run([sys.executable, "-P", "-c", program, url], check=True, timeout=DEADLINE_S)


def test_migrating_again_changes_nothing(db: Database) -> None:
    migrate(db)
    with db.read() as connection:
        assert connection.scalars(select(log_head.c.id)).all() == [1]


@pytest.mark.processes
def test_processes_that_migrate_at_once_all_succeed(database_url: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", MIGRATE, database_url], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [(process.communicate(timeout=DEADLINE_S)[1], process.returncode) for process in processes]
    assert [code for _, code in results] == [0, 0, 0], results
    db = Database(database_url)
    with db.read() as connection:
        assert set(metadata.tables) <= set(inspect(connection).get_table_names())
        assert connection.scalars(select(log_head.c.id)).all() == [1]
    db.close()


def test_an_upgrade_that_was_killed_half_way_is_finished(database_url: str) -> None:
    db = Database(database_url)
    with db.migration() as connection:  # what MySQL leaves behind: some tables, no version
        for name in ("decisions", "log_head", "jobs"):
            metadata.tables[name].create(connection)
        connection.execute(CreateTable(metadata.tables["events"]))  # without its indexes
    migrate(db)
    with db.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    db.close()


@pytest.mark.processes
def test_a_migration_may_take_longer_than_an_answer(
    new_database_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it waits for another migration; altering a large table would also be a single reply."""
    url = new_database_url("mariadb")
    other = Database(url)
    monkeypatch.setattr(database, "ANSWER_TIMEOUT_S", 3.0)
    db = Database(url)
    lock = {"name": f"flyball.migrate.{db.url.database}"}
    with other.read() as connection:
        assert connection.scalar(text("SELECT GET_LOCK(:name, 0)"), lock) == 1
        migration = threading.Thread(target=migrate, args=(db,))
        migration.start()
        processes = "information_schema.processlist"
        waiting = text(f"SELECT MAX(time_ms) FROM {processes} WHERE info LIKE '%GET_LOCK%' AND state = 'User lock'")
        until(lambda: not migration.is_alive() or float(connection.scalar(waiting) or 0.0) >= 3_500.0)
        connection.execute(text("DO RELEASE_LOCK(:name)"), lock)
    migration.join(DEADLINE_S)
    with other.read() as connection:
        assert connection.scalars(select(log_head.c.id)).all() == [1]
    db.close()
    other.close()


def test_a_newer_schema_is_refused_with_the_next_step(db: Database) -> None:
    with db.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StateVersionMismatch, match="9999") as caught:
        migrate(db)
    assert "release" in caught.value.hint


def test_a_database_without_tables_says_what_to_do(database_url: str) -> None:
    db = Database(database_url)
    with pytest.raises(StateVersionMismatch) as caught, db.read() as connection:
        connection.execute(select(log_head))
    assert "start the supervisor" in caught.value.hint
    db.close()


def test_a_write_that_raises_stores_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.write() as connection:
        connection.execute(insert(bus_streams).values(name="x", stream="s", head=0, tail=0))
        raise RuntimeError
    with db.read() as connection:
        assert connection.execute(select(bus_streams)).all() == []


def test_a_read_sees_one_state_however_long_it_takes(db: Database) -> None:
    with db.read() as connection:
        before = connection.scalar(select(log_head.c.revision))
        with db.write() as other:
            other.execute(update(log_head).values(revision=log_head.c.revision + 1))
        assert connection.scalar(select(log_head.c.revision)) == before


def test_writers_in_threads_wait_for_each_other(db: Database) -> None:
    def add() -> None:
        for _ in range(20):
            with db.write() as connection:
                value = connection.scalar(select(log_head.c.revision).with_for_update())
                connection.execute(update(log_head).values(revision=value + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    with db.read() as connection:
        assert connection.scalar(select(log_head.c.revision)) == 80


@pytest.mark.processes
def test_a_process_that_writes_without_a_pause_leaves_others_their_turn(database_url: str) -> None:
    db = Database(database_url)
    migrate(db)
    command = [sys.executable, "-P", "-c", WRITE_ON_AND_ON, database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline() == "begun\n"
            for position in range(20):  # none fails because the other process never let it begin
                with db.write(durable=False) as connection:
                    connection.execute(text("INSERT INTO bus_messages VALUES (:n, '')"), {"n": position})
        finally:
            busy.kill()
    with db.read() as connection:
        assert connection.scalar(text("SELECT COUNT(*) FROM bus_messages")) == 20
    db.close()


def test_a_transaction_that_lost_a_deadlock_is_run_again(db: Database) -> None:
    if db.is_sqlite:
        pytest.skip("SQLite has one writer at a time, and so no deadlocks")
    with db.write() as connection:
        connection.execute(insert(bus_streams), [{"name": n, "stream": "s", "head": 0, "tail": 0} for n in "ab"])
    both = threading.Barrier(2)
    attempts: list[str] = []

    def work(first: str, second: str) -> None:
        def transaction(connection: Connection) -> None:
            attempts.append(first)
            for name in (first, second):
                connection.execute(
                    update(bus_streams).where(bus_streams.c.name == name).values(head=bus_streams.c.head + 1)
                )
                if attempts.count(first) == 1 and name == first:
                    both.wait(DEADLINE_S)

        db.transact(transaction)

    threads = [threading.Thread(target=work, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    with db.read() as connection:
        assert connection.scalars(select(bus_streams.c.head)).all() == [2, 2]
    assert len(attempts) == 3  # one of the two had to run again


def test_a_server_that_takes_no_writes_any_more_is_left_for_its_successor(db: Database) -> None:
    """Another server has the same address, but only new connections reach it."""
    if db.is_sqlite:
        pytest.skip("SQLite has no servers")
    with db.write() as connection, db.write() as other:
        before = {c.scalar(text("SELECT CONNECTION_ID()")) for c in (connection, other)}
    with pytest.raises(Unreachable, match="no writes"), db.write() as connection:
        connection.exec_driver_sql("SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'read-only'")
    with db.write() as connection, db.write() as other:
        after = {c.scalar(text("SELECT CONNECTION_ID()")) for c in (connection, other)}
    assert not before & after


def test_a_file_that_is_removed_under_its_users_is_created_again(tmp_path: Path) -> None:
    file = tmp_path / "flyball.sqlite"
    db = Database(f"sqlite:///{file}")
    migrate(db)
    with db.read() as connection:
        before = connection.scalar(select(cluster.c.cluster_id))
    for each in tmp_path.iterdir():
        each.unlink()
    with pytest.raises(Unreachable, match="was removed"), db.read() as connection:
        connection.execute(select(cluster))
    with db.read() as connection:
        after = connection.scalar(select(cluster.c.cluster_id))
    with db.write() as connection:
        assert connection.scalar(select(cluster.c.cluster_id)) == after, "writers have left the removed file too"
    assert after and after != before
    db.close()
