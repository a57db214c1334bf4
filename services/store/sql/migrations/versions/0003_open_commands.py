"""Which hosts have unanswered commands, from an index alone."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

NEW = "ix_commands_is_open_host_id"
OLD = "ix_commands_host_id_is_open"


# MySQL commits after every statement: an upgrade that was killed half-way finds one of them done the next time.
def upgrade() -> None:
    there = {index["name"] for index in sa.inspect(op.get_bind()).get_indexes("commands")}
    if NEW not in there:
        op.create_index(NEW, "commands", ["is_open", "host_id"])
    if OLD in there:
        op.drop_index(OLD, "commands")
