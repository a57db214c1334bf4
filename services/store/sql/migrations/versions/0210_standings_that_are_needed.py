"""Standings whose word is still needed, although their hosts get commands (docs/decisions/0044)."""

import sqlalchemy as sa
from alembic import op

revision = "0210"
down_revision = "0200"

INDEX = "ix_standings_is_needed"


def upgrade() -> None:
    """Add what is missing: MySQL commits after each statement, so a killed upgrade leaves a part."""
    found = sa.inspect(op.get_bind())
    if "is_needed" not in {column["name"] for column in found.get_columns("standings")}:
        op.add_column("standings", sa.Column("is_needed", sa.Boolean, nullable=False, server_default="0"))
    if INDEX not in {index["name"] for index in found.get_indexes("standings")}:
        op.create_index(INDEX, "standings", ["is_needed"])
