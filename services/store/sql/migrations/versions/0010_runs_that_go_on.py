"""Runs of a job: one that ended goes on, or another begins under its name."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGTEXT

revision = "0010"
down_revision = "0009"


# MySQL commits after every statement: an upgrade that was killed half-way finds the column the next time.
def upgrade() -> None:
    known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("jobs")}
    if "run" not in known:
        op.add_column("jobs", sa.Column("run", sa.String(length=32), nullable=False, server_default=""))
    if "adopted" not in known:
        document = sa.Text().with_variant(LONGTEXT(), "mysql", "mariadb")
        op.add_column("jobs", sa.Column("adopted", document, nullable=True))
