"""Marks that change with every write of a host's rows, so that a controller reads again only what changed."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


# MySQL commits after every statement: an upgrade that was killed half-way goes on where it was.
def upgrade() -> None:
    for name in ("hosts", "host_reports"):
        if "version" not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns(name)}:
            op.add_column(name, sa.Column("version", sa.BigInteger(), nullable=False, server_default="0"))
            with op.batch_alter_table(name) as table:
                table.alter_column("version", existing_type=sa.BigInteger(), server_default=None, nullable=False)
