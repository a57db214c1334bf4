"""Looks at all hosts read an index instead of every row; events of a rare kind are found without reading the log."""

import sqlalchemy as sa
from alembic import op

revision = "0111"
down_revision = "0110"

IN_SHORT = ("failure_domain", "host_id", "state", "left_at", "preempt_deadline_at", "copies_of")
NEW = (
    ("ix_hosts_in_short", "hosts", IN_SHORT),
    ("ix_hosts_state_host_id_left_at", "hosts", ("state", "host_id", "left_at")),
    ("ix_events_kind", "events", ("kind",)),
    ("ix_events_kind_job", "events", ("kind", "job")),
)


def upgrade() -> None:
    # MySQL commits after every statement: a killed upgrade may have done a part of this.
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("hosts")}
    if "copies_of" not in columns:
        op.add_column("hosts", sa.Column("copies_of", sa.String(length=190), nullable=False, server_default="*"))
    for name, table, names in NEW:
        if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
            op.create_index(name, table, names)
