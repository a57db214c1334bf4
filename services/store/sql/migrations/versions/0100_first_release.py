"""The first schema that was released. Later revisions are kept, and each is tested from here on."""

from uuid import uuid4

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0100"
down_revision = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BLOB = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


# MySQL commits after every CREATE: an upgrade that was killed half-way finds a part of its tables the next time.
def create_table(name, *parts):
    op.create_table(name, *parts, if_not_exists=True, **OPTIONS)


def create_index(name, table, columns):
    if name not in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table)}:
        op.create_index(name, table, columns)


def seed(name, key, row):
    table = sa.table(name, *map(sa.column, row))
    connection = op.get_bind()
    if connection.execute(sa.select(table.c[key]).where(table.c[key] == row[key])).first() is None:
        connection.execute(table.insert().values(row))


def upgrade() -> None:
    create_table(
        "bus_messages",
        sa.Column("position", NUMBER, autoincrement=False, nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_bus_messages"),
    )
    create_table(
        "bus_streams",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("head", sa.BigInteger(), nullable=False),
        sa.Column("tail", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_bus_streams"),
    )
    create_table(
        "cluster",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster_id", sa.String(length=32), nullable=False),
        sa.Column("decision_floor", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cluster"),
    )
    create_table(
        "cursors",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("stream", sa.String(length=64), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_cursors"),
    )
    create_table(
        "decisions",
        sa.Column("number", NUMBER, autoincrement=False, nullable=False),
        sa.Column("incident", sa.BigInteger(), nullable=True),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_decisions"),
    )
    create_index("ix_decisions_incident", "decisions", ["incident"])
    create_index("ix_decisions_job", "decisions", ["job"])
    create_table(
        "drains",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("reason", DOCUMENT, nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_drains"),
    )
    create_table(
        "events",
        sa.Column("number", NUMBER, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_events"),
    )
    create_index("ix_events_job", "events", ["job"])
    create_table(
        "host_reports",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("workers", DOCUMENT, nullable=False),
        sa.Column("positions", DOCUMENT, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_host_reports"),
    )
    create_table(
        "hosts",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("reason", DOCUMENT, nullable=False),
        sa.Column("preempt_deadline_at", sa.Double(), nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("left_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("address", sa.String(length=128), nullable=False),
        sa.Column("failure_domain", sa.String(length=128), nullable=False),
        sa.Column("engine_address", sa.String(length=160), nullable=False),
        sa.Column("free_port", sa.Integer(), nullable=False),
        sa.Column("daemon_version", sa.String(length=64), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("interval_s", sa.Double(), nullable=False),
        sa.Column("engine", DOCUMENT, nullable=False),
        sa.Column("copies", DOCUMENT, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_hosts"),
    )
    create_table(
        "incidents",
        sa.Column("number", NUMBER, autoincrement=False, nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("decided_at", sa.Double(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_incidents"),
    )
    create_index("ix_incidents_closed", "incidents", ["closed"])
    create_index("ix_incidents_job", "incidents", ["job"])
    create_table(
        "jobs",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("spec", DOCUMENT, nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("newest_step", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("run", sa.String(length=32), server_default="", nullable=False),
        sa.Column("adopted", DOCUMENT, nullable=True),
        sa.Column("loss", sa.String(length=32), nullable=False),
        sa.Column("loss_step", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_jobs"),
    )
    create_index("ix_jobs_state", "jobs", ["state"])
    create_table(
        "learned_jobs",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("told_at", sa.Double(), nullable=False),
        sa.Column("learned", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_learned_jobs"),
    )
    create_table(
        "lease",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=200), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("incarnation", sa.String(length=32), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_lease"),
    )
    create_table(
        "log_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_event", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_log_head"),
    )
    create_table(
        "persistent_copies",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "step", "rank", name="pk_persistent_copies"),
    )
    create_table(
        "persistent_steps",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "step", name="pk_persistent_steps"),
    )
    create_table(
        "ranks",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("exited_at", sa.Double(), nullable=False),
        sa.Column("exited", DOCUMENT, nullable=True),
        sa.Column("marks", DOCUMENT, nullable=True),
        sa.Column("restored_at", sa.Double(), nullable=False),
        sa.Column("restored", DOCUMENT, nullable=True),
        sa.PrimaryKeyConstraint("job", "generation", "rank", name="pk_ranks"),
    )
    create_table(
        "round_pieces",
        sa.Column("round", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("piece", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("data", BLOB, nullable=False),
        sa.PrimaryKeyConstraint("round", "piece", name="pk_round_pieces"),
    )
    create_table(
        "rounds",
        sa.Column("number", NUMBER, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("signals", DOCUMENT, nullable=False),
        sa.Column("inputs", BLOB, nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_rounds"),
    )
    create_index("ix_rounds_total_bytes", "rounds", ["total_bytes"])
    create_table(
        "signals",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("host_id", sa.String(length=128), nullable=False),
        sa.Column("observed_at", sa.Double(), nullable=False),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_signals"),
        sa.UniqueConstraint("source", "incarnation", "seq", name="uq_signals_source_incarnation_seq"),
    )
    create_index("ix_signals_host_id", "signals", ["host_id"])
    create_index("ix_signals_job_generation", "signals", ["job", "generation"])
    create_table(
        "standings",
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("told_at", sa.Double(), nullable=False),
        sa.Column("first_told_at", sa.Double(), nullable=False),
        sa.Column("is_settled", sa.Boolean(), nullable=False),
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("command_id", sa.String(length=190), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("host_id", name="pk_standings"),
    )
    create_index("ix_standings_is_settled", "standings", ["is_settled"])
    create_table(
        "vouches",
        sa.Column("sensor", sa.String(length=128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("hosts", DOCUMENT, nullable=False),
        sa.Column("ages_ms", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("sensor", name="pk_vouches"),
    )
    create_table(
        "watermarks",
        sa.Column("incarnation", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=128), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "source", name="pk_watermarks"),
    )
    create_table(
        "actions",
        sa.Column("number", NUMBER, autoincrement=False, nullable=False),
        sa.Column("incident", sa.BigInteger(), nullable=True),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("plan", DOCUMENT, nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["number"], ["decisions.number"], name="fk_actions_number"),
        sa.PrimaryKeyConstraint("number", name="pk_actions"),
    )
    create_index("ix_actions_ended", "actions", ["ended"])
    create_index("ix_actions_incident", "actions", ["incident"])
    create_table(
        "generations",
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("decision", sa.BigInteger(), nullable=False),
        sa.Column("plan", DOCUMENT, nullable=False),
        sa.Column("granted_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("restore_step", sa.BigInteger(), nullable=True),
        sa.Column("lineage", DOCUMENT, nullable=True),
        sa.Column("placement", DOCUMENT, nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.job"], name="fk_generations_job"),
        sa.PrimaryKeyConstraint("job", "generation", name="pk_generations"),
    )
    create_table(
        "incident_changes",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("incident", NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("cause", sa.String(length=64), nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["incident"], ["incidents.number"], name="fk_incident_changes_incident"),
        sa.PrimaryKeyConstraint("number", name="pk_incident_changes"),
    )
    create_index("ix_incident_changes_incident", "incident_changes", ["incident"])
    create_table(
        "job_failures",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("cause", sa.String(length=64), nullable=False),
        sa.Column("error_kind", DOCUMENT, nullable=False),
        sa.Column("error_message", DOCUMENT, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.job"], name="fk_job_failures_job"),
        sa.PrimaryKeyConstraint("number", name="pk_job_failures"),
    )
    create_index("ix_job_failures_job", "job_failures", ["job"])
    create_table(
        "action_changes",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("action", NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("message", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["action"], ["actions.number"], name="fk_action_changes_action"),
        sa.PrimaryKeyConstraint("number", name="pk_action_changes"),
    )
    create_index("ix_action_changes_action", "action_changes", ["action"])
    create_table(
        "commands",
        sa.Column("number", NUMBER, nullable=False),
        sa.Column("command_id", sa.String(length=190), nullable=False),
        sa.Column("action", NUMBER, nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("host_id", sa.String(length=64), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("dispatched_at", sa.Double(), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.Integer(), nullable=False),
        sa.Column("answered_at", sa.Double(), nullable=False),
        sa.Column("answer", DOCUMENT, nullable=True),
        sa.Column("answer_revision", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["action"], ["actions.number"], name="fk_commands_action"),
        sa.PrimaryKeyConstraint("number", name="pk_commands"),
        sa.UniqueConstraint("command_id", name="uq_commands_command_id"),
    )
    create_index("ix_commands_action", "commands", ["action"])
    create_index("ix_commands_action_answer_revision", "commands", ["action", "answer_revision"])
    create_index("ix_commands_is_open_host_id", "commands", ["is_open", "host_id"])

    seed("log_head", "id", {"id": 1, "last_event": 0, "revision": 0})
    seed("lease", "name", {"name": "controller", "holder": "", "epoch": 0, "expires_at": 0.0, "incarnation": ""})
    seed("cluster", "id", {"id": 1, "cluster_id": uuid4().hex, "decision_floor": 0})
