"""What changes with every report, apart from what seldom does: one small row per host, and one per sensor."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"

DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
MOVED = {
    "hosts": ("incarnation", "sent_at", "last_report_at", "workers"),
    "ranks": ("pid", "step", "phase", "reported_at"),
}
COPY = """
INSERT INTO host_reports (host_id, incarnation, sent_at, received_at, digest, workers, positions)
SELECT host_id, incarnation, sent_at, last_report_at, '', workers, '[]' FROM hosts
WHERE host_id NOT IN (SELECT host_id FROM host_reports)
"""


# MySQL commits after every statement: an upgrade that was killed half-way goes on where it was.
def upgrade() -> None:
    op.create_table(
        "host_reports",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("workers", DOCUMENT, nullable=False),
        sa.Column("positions", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_host_reports"),
        if_not_exists=True,
        **OPTIONS,
    )
    op.create_table(
        "vouches",
        sa.Column("sensor", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("hosts", DOCUMENT, nullable=False),
        sa.Column("ages_ms", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("sensor", name="pk_vouches"),
        if_not_exists=True,
        **OPTIONS,
    )
    there = {name: {c["name"] for c in sa.inspect(op.get_bind()).get_columns(name)} for name in MOVED}
    if there["hosts"].issuperset(MOVED["hosts"]):
        op.execute(COPY)
    for name, columns in MOVED.items():
        for column in columns:
            if column in there[name]:
                op.drop_column(name, column)
