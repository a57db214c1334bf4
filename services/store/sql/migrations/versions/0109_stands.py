"""What sensors tell each other of ranks that stand still."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0109"
down_revision = "0108"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade() -> None:
    op.create_table(
        "stands",
        sa.Column("sensor", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("sensor", name="pk_stands"),
        if_not_exists=True,
        **OPTIONS,
    )
