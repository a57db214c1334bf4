"""Who did what, and the answers to requests with an Idempotency-Key."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0106"
down_revision = "0105"

OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


# MySQL commits after every statement: a killed upgrade may have made a part of this.
def create_index(table, column):
    name = f"ix_{table}_{column}"
    if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, [column])


def upgrade() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("client", sa.String(length=64), nullable=False),
        sa.Column("operation", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=200), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(length=32), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=False),
        sa.Column("claim", sa.BigInteger(), nullable=False),
        sa.Column("detail", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit_entries"),
        if_not_exists=True,
        **OPTIONS,
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("idempotency_key", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("claim", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("answer", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("idempotency_key", name="pk_idempotency_keys"),
        if_not_exists=True,
        **OPTIONS,
    )
    for table, column in (
        *(("audit_entries", "operation"), ("audit_entries", "target")),
        *(("idempotency_keys", "claim"), ("idempotency_keys", "created_at")),
    ):
        create_index(table, column)
