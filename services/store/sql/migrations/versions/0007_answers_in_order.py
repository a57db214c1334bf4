"""When each command was answered last, so that only new answers are read of an action on very many hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

COLUMN = "answer_revision"
INDEX = "ix_commands_action_answer_revision"


# MySQL commits after every statement: an upgrade that was killed half-way finds one of them done the next time. The
# default stays: to take it away SQLite would have to write the table anew.
def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if COLUMN not in {column["name"] for column in inspector.get_columns("commands")}:
        op.add_column("commands", sa.Column(COLUMN, sa.BigInteger(), nullable=False, server_default="0"))
    if INDEX not in {index["name"] for index in inspector.get_indexes("commands")}:
        op.create_index(INDEX, "commands", ["action", COLUMN])
