"""The schema of release 0.1.0, with which migrations begin. Written once: never change it, add a revision."""

from functools import partial
from uuid import uuid4

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Boolean, Double, ForeignKey, Index, Integer, String, UniqueConstraint
from sqlalchemy.dialects import mysql

from flyball.contracts.errors import StateVersionMismatch

revision = "0200"
down_revision = None

NUMBER = BigInteger().with_variant(Integer(), "sqlite")
BLOB = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
schema = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Column = partial(sa.Column, nullable=False)


def table(name, *parts):
    sa.Table(name, schema, *parts, **OPTIONS)


def upgrade() -> None:
    """Create what is missing: MySQL commits after each statement, so a killed creation leaves a part."""
    connection = op.get_bind()
    refuse_other_tables(connection)
    for each in schema.sorted_tables:
        each.create(connection, checkfirst=True)
        for index in each.indexes:
            index.create(connection, checkfirst=True)
    seed("log_head", "id", {"id": 1, "last_event": 0, "revision": 0})
    seed("lease", "name", {"name": "controller", "holder": "", "epoch": 0, "expires_at": 0.0, "incarnation": ""})
    seed("cluster", "id", {"id": 1, "cluster_id": uuid4().hex, "decision_floor": 0})


def refuse_other_tables(connection) -> None:
    """Raise StateVersionMismatch for a table of another program, or of a build before 0.1.0."""
    found = sa.inspect(connection)
    for each in schema.sorted_tables:
        if found.has_table(each.name):
            columns = {column["name"] for column in found.get_columns(each.name)}
            if missing := [column.name for column in each.columns if column.name not in columns]:
                raise StateVersionMismatch(
                    f"The database has a table {each.name} without the columns {', '.join(missing)}.",
                    hint="another program made it, or a Flyball from before the first release: use an empty database",
                )


def seed(name, key, row) -> None:
    each = schema.tables[name]
    if op.get_bind().execute(sa.select(each).where(each.c[key] == row[key])).first() is None:
        op.get_bind().execute(each.insert().values(row))


table("lease",
    Column("name", String(32), primary_key=True), Column("holder", String(200)), Column("epoch", BigInteger),
    Column("expires_at", Double), Column("incarnation", String(32), server_default=""),
)
table("cluster",
    Column("id", Integer, primary_key=True, autoincrement=False), Column("cluster_id", String(32)),
    Column("decision_floor", BigInteger),
)
table("standings",
    Column("host_id", String(64), primary_key=True), Column("told_at", Double),
    Column("first_told_at", Double), Column("is_settled", Boolean), Column("cluster", String(32)),
    Column("command_id", String(190)), Column("document", DOCUMENT), Index(None, "is_settled"),
)
table("cursors",
    Column("name", String(32), primary_key=True), Column("stream", String(64)),
    Column("position", BigInteger),
)
table("signals",
    Column("number", NUMBER, primary_key=True), Column("source", String(128)),
    Column("incarnation", String(64)), Column("seq", BigInteger), Column("kind", String(32)), Column("job", String(64)),
    Column("generation", Integer), Column("host_id", String(128)), Column("observed_at", Double),
    Column("stored_at", Double), Column("document", DOCUMENT), UniqueConstraint("source", "incarnation", "seq"),
    Index(None, "host_id"), Index(None, "job"), Index(None, "job", "generation", "observed_at"), Index(None, "kind"),
)
table("watermarks",
    Column("incarnation", String(64), primary_key=True), Column("source", String(128), primary_key=True),
    Column("seq", BigInteger),
)
table("hosts",
    Column("host_id", String(64), primary_key=True), Column("state", String(32)), Column("since", Double),
    Column("reason", DOCUMENT), Column("preempt_deadline_at", Double), Column("joined_at", Double),
    Column("left_at", Double, server_default="0"), Column("address", String(128)),
    Column("failure_domain", String(128)), Column("engine_address", String(160)), Column("free_port", Integer),
    Column("daemon_version", String(64)), Column("pid", Integer), Column("interval_s", Double),
    Column("engine", DOCUMENT), Column("copies", DOCUMENT), Column("version", BigInteger),
    Column("fabric", String(128), server_default=""), Column("memory_bytes", BigInteger, server_default="0"),
    Column("copies_of", String(190), server_default="*"),
    Index("ix_hosts_in_short", "failure_domain", "host_id", "state", "left_at", "preempt_deadline_at", "copies_of"),
    Index(None, "state", "host_id", "left_at"),
)
table("host_reports",
    Column("host_id", String(64), primary_key=True), Column("incarnation", String(64)),
    Column("sent_at", Double), Column("received_at", Double), Column("digest", String(32)), Column("workers", DOCUMENT),
    Column("positions", DOCUMENT), Column("version", BigInteger),
)
table("vouches",
    Column("sensor", String(128), primary_key=True), Column("at", Double), Column("hosts", DOCUMENT),
    Column("ages_ms", DOCUMENT),
)
table("stands",
    Column("sensor", String(128), primary_key=True), Column("at", Double), Column("document", DOCUMENT),
)
table("learned_jobs",
    Column("job", String(64), primary_key=True), Column("told_at", Double), Column("learned", DOCUMENT),
)
table("drains",
    Column("host_id", String(64), primary_key=True), Column("state", String(32)),
    Column("requested_at", Double), Column("deadline_at", Double), Column("reason", DOCUMENT),
    Column("message", DOCUMENT),
)
table("host_conditions",
    Column("host_id", String(64), primary_key=True), Column("source", String(100), primary_key=True),
    Column("kind", String(64), primary_key=True), Column("subject", String(100), primary_key=True),
    Column("until", Double), Column("is_overruled", Boolean), Column("document", DOCUMENT),
)
table("host_checks",
    Column("host_id", String(64), primary_key=True), Column("state", String(32)),
    Column("action", BigInteger), Column("document", DOCUMENT),
)
table("orders",
    Column("kind", String(32), primary_key=True), Column("target", String(140), primary_key=True),
    Column("requested_at", Double), Column("until", Double), Column("state", String(32)), Column("awaited", String(32)),
    Column("action_id", String(32), server_default=""), Column("reason", DOCUMENT), Column("message", DOCUMENT),
)
table("audit_entries",
    Column("number", NUMBER, primary_key=True), Column("at", Double), Column("ended_at", Double),
    Column("role", String(32)), Column("token", String(32)), Column("client", String(64)),
    Column("operation", String(64)), Column("target", String(200)), Column("status", Integer),
    Column("code", String(32)), Column("idempotency_key", String(255)), Column("claim", BigInteger),
    Column("detail", DOCUMENT), Index(None, "at"), Index(None, "operation"), Index(None, "target"),
)
table("idempotency_keys",
    Column("idempotency_key", String(255), primary_key=True), Column("digest", String(32)),
    Column("claim", BigInteger), Column("created_at", Double), Column("status", Integer), Column("answer", DOCUMENT),
    Index(None, "claim"), Index(None, "created_at"),
)
table("ranks",
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False), Column("host_id", String(64)),
    Column("exited_at", Double), Column("exited", DOCUMENT, nullable=True), Column("marks", DOCUMENT, nullable=True),
    Column("restored_at", Double), Column("restored", DOCUMENT, nullable=True),
)
table("persistent_copies",
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False), Column("size_bytes", BigInteger),
    Column("digest", String(64)),
)
table("persistent_steps",
    Column("job", String(64), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False), Column("version", BigInteger),
)
table("jobs",
    Column("job", String(64), primary_key=True), Column("spec", DOCUMENT), Column("state", String(32)),
    Column("message", DOCUMENT), Column("submitted_at", Double), Column("ended_at", Double),
    Column("stop_requested", Boolean), Column("newest_step", BigInteger), Column("generation", Integer),
    Column("run", String(32), server_default=""), Column("adopted", DOCUMENT, nullable=True),
    Column("loss", String(32)), Column("loss_step", BigInteger), Index(None, "state"),
)
table("job_failures",
    Column("number", NUMBER, primary_key=True), Column("job", String(64), ForeignKey("jobs.job")),
    Column("generation", Integer), Column("cause", String(64)), Column("error_kind", DOCUMENT),
    Column("error_message", DOCUMENT), Column("step", BigInteger), Column("host_id", String(64), server_default=""),
    Index(None, "job"),
)
table("generations",
    Column("job", String(64), ForeignKey("jobs.job"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False), Column("decision", BigInteger),
    Column("plan", DOCUMENT), Column("granted_at", Double), Column("started_at", Double),
    Column("restore_step", BigInteger, nullable=True), Column("lineage", DOCUMENT, nullable=True),
    Column("placement", DOCUMENT, nullable=True),
)
table("incidents",
    Column("number", NUMBER, primary_key=True, autoincrement=False), Column("job", String(64)),
    Column("state", String(32)), Column("closed", Boolean), Column("decided_at", Double),
    Column("host_id", String(64), server_default=""), Column("cause", String(64), server_default=""),
    Column("opened_at", Double, server_default="0"), Column("document", DOCUMENT), Index(None, "cause"),
    Index(None, "closed"), Index(None, "host_id"), Index(None, "job"), Index(None, "state"),
)
table("incident_changes",
    Column("number", NUMBER, primary_key=True),
    Column("incident", NUMBER, ForeignKey("incidents.number")), Column("at", Double), Column("state", String(32)),
    Column("cause", String(64)), Column("message", DOCUMENT), Index(None, "incident"),
)
table("decisions",
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("incident", BigInteger, nullable=True), Column("job", String(64)), Column("kind", String(32)),
    Column("at", Double), Column("epoch", BigInteger), Column("document", DOCUMENT), Index(None, "incident"),
    Index(None, "job"), Index(None, "kind"),
)
table("rounds",
    Column("number", NUMBER, primary_key=True, autoincrement=False), Column("at", Double),
    Column("epoch", BigInteger), Column("version", String(64)), Column("signals", DOCUMENT), Column("inputs", BLOB),
    Column("total_bytes", BigInteger), Index(None, "total_bytes"),
)
table("round_pieces",
    Column("round", BigInteger, primary_key=True, autoincrement=False),
    Column("piece", Integer, primary_key=True, autoincrement=False), Column("data", BLOB),
)
table("actions",
    Column("number", NUMBER, ForeignKey("decisions.number"), primary_key=True, autoincrement=False),
    Column("incident", BigInteger, nullable=True), Column("job", String(64)), Column("plan", DOCUMENT),
    Column("state", String(32)), Column("ended", Boolean), Column("phase", String(32)), Column("attempt", Integer),
    Column("version", Integer), Column("message", DOCUMENT), Column("started_at", Double), Column("ended_at", Double),
    Index(None, "ended"), Index(None, "incident"), Index(None, "job"), Index(None, "state"),
)
table("action_changes",
    Column("number", NUMBER, primary_key=True),
    Column("action", NUMBER, ForeignKey("actions.number")), Column("at", Double), Column("phase", String(32)),
    Column("state", String(32)), Column("message", DOCUMENT), Index(None, "action"),
)
table("commands",
    Column("number", NUMBER, primary_key=True), Column("command_id", String(190)),
    Column("action", NUMBER, ForeignKey("actions.number")), Column("phase", String(32)), Column("host_id", String(64)),
    Column("document", DOCUMENT), Column("created_at", Double), Column("dispatched_at", Double),
    Column("is_open", Boolean), Column("progress", Integer), Column("answered_at", Double),
    Column("answer", DOCUMENT, nullable=True), Column("answer_revision", BigInteger, server_default="0"),
    UniqueConstraint("command_id"), Index(None, "action"), Index(None, "action", "answer_revision"),
    Index(None, "is_open", "host_id"),
)
table("log_head",
    Column("id", Integer, primary_key=True, autoincrement=False), Column("last_event", BigInteger),
    Column("revision", BigInteger), Column("conditions_revision", BigInteger, server_default="0"),
)
table("events",
    Column("number", NUMBER, primary_key=True, autoincrement=False), Column("at", Double),
    Column("kind", String(32)), Column("job", String(64)), Column("document", DOCUMENT), Index(None, "job"),
    Index(None, "kind"), Index(None, "kind", "job"),
)
table("bus_streams",
    Column("name", String(32), primary_key=True), Column("stream", String(64)),
    Column("head", BigInteger), Column("tail", BigInteger),
)
table("bus_messages",
    Column("position", NUMBER, primary_key=True, autoincrement=False), Column("document", DOCUMENT),
)
