"""The newest schema in an SQLite file that is empty, at once: without a revision after the other, and without alembic.

Every run on one machine makes such a file, and somebody waits for it. On SQLite this is one transaction, whole or not
at all; a MySQL server commits each table by itself, so there the revisions do it, which can go on half-way. A test
compares the two schemas, and their rows.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, inspect, text

from services.store.sql.tables import cluster, lease, log_head, metadata

_REVISIONS = Path(__file__).parent / "migrations" / "versions"


def newest_revision() -> str:
    """The one that the newest file of `migrations/versions` makes: its name begins with it."""
    return max(path.name.partition("_")[0] for path in _REVISIONS.glob("[0-9]*.py"))


def is_newest_or_made(connection: Connection) -> bool:
    """Whether an SQLite database has the newest schema, which an empty one is given here."""
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables:
        found = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
        return found == [newest_revision()]
    if tables:
        return False
    metadata.create_all(connection, checkfirst=False)
    connection.execute(log_head.insert().values(id=1, last_event=0, revision=0))
    connection.execute(lease.insert().values(name="controller", holder="", epoch=0, expires_at=0.0, incarnation=""))
    connection.execute(cluster.insert().values(id=1, cluster_id=uuid4().hex, decision_floor=0))
    # As alembic makes its table.
    connection.execute(
        text(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
            "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": newest_revision()})
    return True
