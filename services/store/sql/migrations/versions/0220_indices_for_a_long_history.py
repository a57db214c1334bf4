"""Indices for a year of history: which generation a decision granted, and which commands a host has answered."""

import sqlalchemy as sa
from alembic import op

revision = "0220"
down_revision = "0210"

INDICES = {
    "ix_generations_decision": ("generations", ["decision"]),
    "ix_commands_host_id_progress_number": ("commands", ["host_id", "progress", "number"]),
}


def upgrade() -> None:
    """Add what is missing: MySQL commits after each statement, so a killed upgrade leaves a part."""
    for name, (table, columns) in INDICES.items():
        if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
            op.create_index(name, table, columns)
