"""Brings a database up to this release, whichever way is the quickest."""

from __future__ import annotations

from flyball.contracts.errors import Unreachable
from services.store.sql.database import Database

MIGRATION_ATTEMPTS = 6  # on SQLite


def migrate(db: Database) -> None:
    """Bring the schema up to this release. Safe when several processes do it at once.

    Raises StateVersionMismatch if a newer release has been here.
    """
    from services.store.sql.fresh_schema import is_newest_or_made

    for attempt in range(1, MIGRATION_ATTEMPTS + 1):
        try:
            if db.is_sqlite:
                with db.write() as connection:
                    if is_newest_or_made(connection):
                        return
            from services.store.sql.migrations.runner import upgrade  # alembic takes long to import

            upgrade(db)
        except Unreachable:  # another process migrates for longer than a transaction waits
            if not db.is_sqlite or attempt == MIGRATION_ATTEMPTS:
                raise
        else:
            return
