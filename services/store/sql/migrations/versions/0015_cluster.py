"""Who this database is, and what hosts told that it did not know."""

from uuid import uuid4

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0015"
down_revision = "0014"

DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


# MySQL commits after every statement: an upgrade that was killed half-way goes on the next time.
def upgrade() -> None:
    bind = op.get_bind()
    columns = {column["name"] for column in sa.inspect(bind).get_columns("lease")}
    if "incarnation" not in columns:
        op.add_column("lease", sa.Column("incarnation", sa.String(length=32), nullable=False, server_default=""))
    cluster = op.create_table(
        "cluster",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster_id", sa.String(length=32), nullable=False),
        sa.Column("decision_floor", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cluster"),
        if_not_exists=True,
        **OPTIONS,
    )
    if bind.scalar(sa.select(sa.func.count()).select_from(cluster)) == 0:
        op.bulk_insert(cluster, [{"id": 1, "cluster_id": uuid4().hex, "decision_floor": 0}])
    op.create_table(
        "standings",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("told_at", sa.Double(), nullable=False),
        sa.Column("first_told_at", sa.Double(), nullable=False),
        sa.Column("is_settled", sa.Boolean(), nullable=False),
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("command_id", sa.String(length=190), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_standings"),
        if_not_exists=True,
        **OPTIONS,
    )
    indexes = {index["name"] for index in sa.inspect(bind).get_indexes("standings")}
    if "ix_standings_is_settled" not in indexes:
        op.create_index("ix_standings_is_settled", "standings", ["is_settled"])
