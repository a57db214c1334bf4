"""Brings a database up to this release, whichever way is the quickest."""

from __future__ import annotations

from functools import partial

from flyball.contracts.errors import StateVersionMismatch, Unreachable
from services.store.sql.database import Database
from services.store.sql.left_state import revisions

MIGRATION_ATTEMPTS = 6  # on SQLite


def refuse_from_before(name: str, found: str | None) -> None:
    """Raise StateVersionMismatch if the schema that was found in the database `name` was never released: no release
    reads it or brings it up to date."""
    if found is not None and found < revisions()[0]:
        raise StateVersionMismatch(
            f"The database {name} has schema {found}, from before the first release.",
            hint="no release reads it: start with an empty database; running jobs are taken over from their hosts",
        )


def migrate(db: Database) -> None:
    """Bring the schema up to this release. Safe when several processes do it at once.

    An SQLite file that is removed later on, or replaced by an empty one, gets its schema again.

    Raises StateVersionMismatch if a newer release has been here, or none yet.
    """
    from services.store.sql.fresh_schema import is_newest_or_made

    db.make_schema = partial(migrate, db)
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
