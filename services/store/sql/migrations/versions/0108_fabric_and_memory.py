"""In which fabric a host is, and how much memory it has: for the choice of spares."""

import sqlalchemy as sa
from alembic import op

revision = "0108"
down_revision = "0107"


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("hosts")}
    for column in (
        sa.Column("fabric", sa.String(length=128), nullable=False, server_default=""),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False, server_default="0"),
    ):
        if column.name not in columns:  # MySQL commits after every statement: a killed upgrade may have added it
            op.add_column("hosts", column)
