"""What lists of the API filter by: columns of incidents, and indexes in the order of the lists."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0105"
down_revision = "0104"

INDEXES = (
    *(("signals", "job"), ("signals", "kind"), ("decisions", "kind"), ("actions", "job"), ("actions", "state")),
    *(("incidents", "host_id"), ("incidents", "cause"), ("incidents", "state")),
)
ROWS_AT_ONCE = 500


def upgrade() -> None:
    # MySQL commits after every statement: a killed upgrade may have done a part of this.
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("incidents")}
    for name, kind, default in (
        ("host_id", sa.String(length=64), ""),
        ("cause", sa.String(length=64), ""),
        ("opened_at", sa.Double(), "0"),
    ):
        if name not in columns:
            op.add_column("incidents", sa.Column(name, kind, nullable=False, server_default=default))
    fill_incidents()
    for table, column in INDEXES:
        name = f"ix_{table}_{column}"
        if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
            op.create_index(name, table, [column])


def fill_incidents() -> None:
    connection = op.get_bind()
    incidents = sa.table("incidents", *map(sa.column, ("number", "document", "host_id", "cause", "opened_at")))
    last = -1
    while True:
        query = sa.select(incidents.c.number, incidents.c.document).where(incidents.c.number > last)
        rows = connection.execute(query.order_by(incidents.c.number).limit(ROWS_AT_ONCE)).all()
        for row in rows:
            found = json.loads(row.document)
            if isinstance(found, dict):
                values = {
                    "host_id": found.get("host_id", ""),
                    "cause": found.get("cause", ""),
                    "opened_at": found.get("opened_at", 0.0),
                }
                connection.execute(sa.update(incidents).where(incidents.c.number == row.number).values(values))
        if len(rows) < ROWS_AT_ONCE:
            return
        last = rows[-1].number
