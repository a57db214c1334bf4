"""Running accounts of goodput, and the ratios that metrics show."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0230"
down_revision = "0220"

BLOB = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
TABLES = {
    "goodput_accounts": (("version", sa.Integer()), ("position", sa.BigInteger()), ("document", BLOB)),
    "goodput_ratios": (("ratio", sa.Double()),),
}


def upgrade() -> None:
    """Add what is missing: MySQL commits after each statement, so a killed upgrade leaves a part."""
    there = set(sa.inspect(op.get_bind()).get_table_names())
    for name, columns in TABLES.items():
        if name not in there:
            op.create_table(
                name,
                sa.Column("job", sa.String(64), nullable=False),
                *(sa.Column(column, kind, nullable=False) for column, kind in columns),
                sa.PrimaryKeyConstraint("job", name=f"pk_{name}"),
                **OPTIONS,
            )
