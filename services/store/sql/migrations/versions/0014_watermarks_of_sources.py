"""What is committed is told by source and incarnation: a host cannot acknowledge what another sent."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}

# Of each sender that has a first signal, the first after which the next one is missing. The old marks are not asked:
# they do not tell whose they are.
FILL = """
INSERT INTO watermarks (incarnation, source, seq)
SELECT s.incarnation, s.source, MIN(s.seq) FROM signals s
JOIN signals one ON one.source = s.source AND one.incarnation = s.incarnation AND one.seq = 1
LEFT JOIN signals later ON later.source = s.source AND later.incarnation = s.incarnation AND later.seq = s.seq + 1
WHERE s.seq >= 1 AND later.seq IS NULL
GROUP BY s.incarnation, s.source
"""


# MySQL commits after every statement: an upgrade that was killed half-way fills the table anew the next time.
def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if inspector.has_table("watermarks"):
        if "source" in {column["name"] for column in inspector.get_columns("watermarks")}:
            op.execute("DELETE FROM watermarks")
        else:
            op.drop_table("watermarks")
    op.create_table(
        "watermarks",
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "source", name="pk_watermarks"),
        if_not_exists=True,
        **OPTIONS,
    )
    op.execute(FILL)
