"""Signals of a job's generation are found by when they were observed; old records of requests, by their time."""

import sqlalchemy as sa
from alembic import op

revision = "0110"
down_revision = "0109"

NEW = (
    ("signals", ("job", "generation", "observed_at")),
    ("audit_entries", ("at",)),
)
OLD = "ix_signals_job_generation"


def upgrade() -> None:
    # MySQL commits after every statement: a killed upgrade may have done a part of this.
    for table, columns in NEW:
        name = f"ix_{table}_{'_'.join(columns)}"
        if name not in _indexes(table):
            op.create_index(name, table, columns)
    if OLD in _indexes("signals"):
        op.drop_index(OLD, "signals")


def _indexes(table: str) -> set[str]:
    return {str(index["name"]) for index in sa.inspect(op.get_bind()).get_indexes(table)}
