"""Runs the revisions for alembic, on the connection that `schema_upgrade` passes in."""

from __future__ import annotations

from alembic import context

from services.store.sql.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=False,
    render_as_batch=True,  # SQLite alters a table by copying it
)
context.run_migrations()
