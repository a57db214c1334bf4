"""What an approval is tied to: the incident's last action when it was given."""

import sqlalchemy as sa
from alembic import op

revision = "0103"
down_revision = "0102"


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("orders")}
    if "action_id" not in columns:  # MySQL commits after every statement: a killed upgrade may have added it
        op.add_column("orders", sa.Column("action_id", sa.String(length=32), nullable=False, server_default=""))
