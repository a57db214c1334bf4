"""Room for rounds that are larger than a server takes in one packet."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.mysql import LONGBLOB

revision = "0009"
down_revision = "0008"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


# MySQL commits after every CREATE: an upgrade that was killed half-way finds the table the next time.
def upgrade() -> None:
    op.create_table(
        "round_pieces",
        sa.Column("round", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("piece", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb"), nullable=False),
        sa.PrimaryKeyConstraint("round", "piece", name="pk_round_pieces"),
        if_not_exists=True,
        **OPTIONS,
    )
