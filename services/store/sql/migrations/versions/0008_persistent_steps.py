"""Marks of the steps of which there are persistent copies, so that only those that changed are read again."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


# MySQL commits after every CREATE: an upgrade that was killed half-way finds the table the next time.
def upgrade() -> None:
    op.create_table(
        "persistent_steps",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "step", name="pk_persistent_steps"),
        if_not_exists=True,
        **OPTIONS,
    )
    op.execute(
        "INSERT INTO persistent_steps (job, generation, step, version) "
        "SELECT DISTINCT c.job, c.generation, c.step, 1 FROM persistent_copies c WHERE NOT EXISTS "
        "(SELECT 1 FROM persistent_steps s WHERE s.job = c.job AND s.generation = c.generation AND s.step = c.step)"
    )
