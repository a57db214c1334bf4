"""Conditions that stand on hosts."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0101"
down_revision = "0100"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


def upgrade() -> None:
    op.create_table(
        "host_conditions",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=100), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=100), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("is_overruled", sa.Boolean(), nullable=False),
        sa.Column("document", sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False),
        sa.PrimaryKeyConstraint("host_id", "source", "kind", "subject", name="pk_host_conditions"),
        if_not_exists=True,  # MySQL commits after every CREATE: a killed upgrade may have made it
        **OPTIONS,
    )
