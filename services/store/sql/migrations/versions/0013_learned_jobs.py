"""What sensors have learned of jobs, so that one that is started again need not learn it anew."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0013"
down_revision = "0012"

DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


# MySQL commits after every CREATE: an upgrade that was killed half-way finds the table the next time.
def upgrade() -> None:
    op.create_table(
        "learned_jobs",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("told_at", sa.Double(), nullable=False),
        sa.Column("learned", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_learned_jobs"),
        if_not_exists=True,
        **OPTIONS,
    )
