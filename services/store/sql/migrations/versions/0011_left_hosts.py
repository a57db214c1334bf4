"""Hosts that ended in order: when, so that nobody looks for them."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


# MySQL commits after every statement: an upgrade that was killed half-way finds the column the next time.
def upgrade() -> None:
    if "left_at" in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("hosts")}:
        return
    op.add_column("hosts", sa.Column("left_at", sa.Double(), server_default="0", nullable=False))
