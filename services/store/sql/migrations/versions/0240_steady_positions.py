"""Newer positions of hosts that report nothing else, in one document per some hundred hosts; marks of the tables that
views are read from (docs/decisions/0052)."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0240"
down_revision = "0230"

DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


def upgrade() -> None:
    """Add what is missing: MySQL commits after each statement, so a killed upgrade leaves a part."""
    found = sa.inspect(op.get_bind())
    if not found.has_table("steady_positions"):
        op.create_table(
            "steady_positions",
            sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("version", sa.BigInteger, nullable=False),
            sa.Column("document", DOCUMENT, nullable=False),
            **OPTIONS,
        )
    if not found.has_table("table_marks"):
        op.create_table(
            "table_marks",
            sa.Column("name", sa.String(32), primary_key=True),
            sa.Column("mark", sa.BigInteger, nullable=False),
            **OPTIONS,
        )
