"""Brings a database up to the newest revision, once, however many processes try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from flyball.contracts.errors import StateVersionMismatch, Unreachable
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import refuse_from_before

LOCK_TIMEOUT_S = 60


def upgrade(db: Database) -> None:
    """Apply what is missing. Raises StateVersionMismatch if the database is newer than this release, or from before the
    first one."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    with db.migration() as connection, _alone(db, connection):
        found = MigrationContext.configure(connection).get_current_revision()
        if found == script.get_current_head():
            return
        known = {revision.revision for revision in script.walk_revisions()}
        refuse_from_before(db.name, found)
        if found is not None and found not in known:
            raise StateVersionMismatch(
                f"The database {db.name} has schema {found}, which this release does not know.",
                hint="run the release of Flyball that wrote it, or a newer one",
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


@contextmanager
def _alone(db: Database, connection: Connection) -> Iterator[None]:
    """On SQLite the write transaction itself keeps others out, and takes a half-done upgrade back."""
    if db.is_sqlite:
        yield
        return
    name = f"flyball.migrate.{db.url.database}"[:64]
    if connection.scalar(text("SELECT GET_LOCK(:name, :timeout_s)"), {"name": name, "timeout_s": LOCK_TIMEOUT_S}) != 1:
        raise Unreachable(
            f"Another process has been migrating {db.name} for {LOCK_TIMEOUT_S} s.", hint="look at what it waits for"
        )
    try:
        yield
    finally:
        connection.execute(text("DO RELEASE_LOCK(:name)"), {"name": name})
