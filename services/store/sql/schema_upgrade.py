"""Creates the schema of this release in an empty database, or upgrades an older one, however many processes try.

An empty database gets its tables straight from `tables`, without replaying the revisions and without importing alembic:
every run on one machine creates an SQLite file, and its user waits for it. Tests compare both ways. The first revision
is the schema of release 0.1.0; later ones are added, and none is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, inspect, text
from sqlalchemy.schema import CreateTable

from flyball.contracts.errors import StateVersionMismatch, Unreachable
from services.store.sql.database import Database
from services.store.sql.tables import cluster, lease, log_head, metadata

MIGRATIONS = Path(__file__).parent / "migrations"
ATTEMPTS = 6  # on SQLite, where one attempt waits as long as a transaction
LOCK_TIMEOUT_S = 60


def migrate(db: Database) -> None:
    """Bring the schema up to this release. Safe when several processes do it at once.

    An SQLite file that is removed later, or replaced by an empty one, gets its schema again.

    Raises StateVersionMismatch if the schema is newer than this release, or older than the first one.
    """
    db.make_schema = partial(migrate, db)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with db.migration() as connection, _alone(db, connection):
                if _is_empty(connection):
                    create(connection)
                elif _revision(connection) != revisions()[-1]:
                    upgrade(connection, db.name)
        except Unreachable:  # another process migrates for longer than a transaction waits
            if not db.is_sqlite or attempt == ATTEMPTS:
                raise
        else:
            return


def check(connection: Connection, name: str) -> None:
    """Raise StateVersionMismatch unless the database `name` has exactly this release's schema."""
    found, known = _revision(connection), revisions()
    if found == known[-1]:
        return
    _refuse_unreleased(name, found)
    is_older = found is None or found in known
    raise StateVersionMismatch(
        f"The database {name} has schema {found or 'none'}; this release uses {known[-1]}.",
        hint="start a supervisor of this release on it once, which upgrades the schema"
        if is_older
        else "use the release of Flyball that wrote it, or a newer one",
    )


def revisions() -> list[str]:
    """Return the revisions of the schema that this release knows, oldest first: the prefixes of their files' names."""
    return sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def create(connection: Connection) -> None:
    """Create the newest schema in an empty database.

    SQLite does it in the caller's transaction. MySQL commits each statement; if it is killed half-way, the database has
    tables but no revision, and `upgrade` creates the rest.
    """
    if connection.dialect.name == "sqlite":
        metadata.create_all(connection, checkfirst=False)
    else:
        _create_tables_with_indexes(connection)
    connection.execute(log_head.insert().values(id=1, last_event=0, revision=0))
    connection.execute(lease.insert().values(name="controller", holder="", epoch=0, expires_at=0.0, incarnation=""))
    connection.execute(cluster.insert().values(id=1, cluster_id=uuid4().hex, decision_floor=0))
    # The same table that alembic creates.
    connection.execute(
        text(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revisions()[-1]})


def upgrade(connection: Connection, name: str) -> None:
    """Run the revisions that are missing. Raises StateVersionMismatch if the database's revision is unknown."""
    from alembic import command  # slow to import
    from alembic.config import Config

    found = _revision(connection)
    _refuse_unreleased(name, found)
    if found is not None and found not in revisions():
        raise StateVersionMismatch(
            f"The database {name} has schema {found}, which this release does not know.",
            hint="run the release of Flyball that wrote it, or a newer one",
        )
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _create_tables_with_indexes(connection: Connection) -> None:
    """Create each table and its indexes in one statement: MySQL syncs every statement to disk."""
    quote = connection.dialect.identifier_preparer.quote
    for table in metadata.sorted_tables:
        statement = str(CreateTable(table).compile(dialect=connection.dialect))
        columns, end, options = statement.rpartition("\n)")
        for index in table.indexes:
            names = ", ".join(quote(column.name) for column in index.columns)
            columns += f", INDEX {quote(str(index.name))} ({names})"
        connection.exec_driver_sql(columns + end + options)


def _is_empty(connection: Connection) -> bool:
    return not inspect(connection).get_table_names()


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if found is None else str(found)


def _refuse_unreleased(name: str, found: str | None) -> None:
    if found is not None and found < revisions()[0]:
        raise StateVersionMismatch(
            f"The database {name} has schema {found}, from before the first release.",
            hint="no release reads it: start with an empty database (an SQLite file: move it away); running jobs are "
            "adopted from their hosts",
        )


@contextmanager
def _alone(db: Database, connection: Connection) -> Iterator[None]:
    """Keep other processes out. On SQLite the write transaction does, and rolls a half-done upgrade back."""
    if db.is_sqlite:
        yield
        return
    name = f"flyball.migrate.{db.url.database}"[:64]
    if connection.scalar(text("SELECT GET_LOCK(:name, :timeout_s)"), {"name": name, "timeout_s": LOCK_TIMEOUT_S}) != 1:
        raise Unreachable(
            f"Another process has been migrating {db.name} for {LOCK_TIMEOUT_S} s.", hint="check what it is waiting for"
        )
    try:
        yield
    finally:
        connection.execute(text("DO RELEASE_LOCK(:name)"), {"name": name})
