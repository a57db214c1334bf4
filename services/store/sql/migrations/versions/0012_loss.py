"""The newest loss that a job told of."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


# MySQL commits after every statement: an upgrade that was killed half-way goes on where it was.
def upgrade() -> None:
    for name, kind, default in (("loss", sa.String(32), ""), ("loss_step", sa.BigInteger(), "-1")):
        if name not in {column["name"] for column in sa.inspect(op.get_bind()).get_columns("jobs")}:
            op.add_column("jobs", sa.Column(name, kind, nullable=False, server_default=default))
            with op.batch_alter_table("jobs") as table:
                table.alter_column(name, existing_type=kind, server_default=None, nullable=False)
