"""The newest check of each host."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0107"
down_revision = "0106"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


def upgrade() -> None:
    op.create_table(
        "host_checks",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("action", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_host_checks"),
        if_not_exists=True,  # MySQL commits after every CREATE: a killed upgrade may have made it
        **OPTIONS,
    )
