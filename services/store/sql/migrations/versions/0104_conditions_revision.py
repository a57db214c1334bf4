"""As of which revision of the log conditions of hosts last changed: readers keep what they read until then."""

import sqlalchemy as sa
from alembic import op

revision = "0104"
down_revision = "0103"


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("log_head")}
    if "conditions_revision" not in columns:  # MySQL commits after every statement: a killed upgrade may have added it
        added = sa.Column("conditions_revision", sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("log_head", added)
