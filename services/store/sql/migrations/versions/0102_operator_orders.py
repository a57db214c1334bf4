"""Operators' orders, and the hosts on which jobs failed."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0102"
down_revision = "0101"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("target", sa.String(length=140), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("awaited", sa.String(length=32), nullable=False),
        sa.Column("reason", DOCUMENT, nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("kind", "target", name="pk_orders"),
        if_not_exists=True,  # MySQL commits after every statement: a killed upgrade may have made it
        **OPTIONS,
    )
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("job_failures")}
    if "host_id" not in columns:
        op.add_column("job_failures", sa.Column("host_id", sa.String(length=64), nullable=False, server_default=""))
