"""The tables. Contract values are stored whole, as JSON documents; columns hold what is searched or changed by itself.

`migrations` upgrades existing databases to this schema; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
)
from sqlalchemy.dialects.mysql import LONGBLOB, LONGTEXT
from sqlalchemy.schema import SchemaItem

from services.store.sql.broken_text import String, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

MYSQL_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}

Name = String(64)  # a job, a host, an incarnation
Word = String(32)  # a member of one of our enums
Number = BigInteger().with_variant(Integer(), "sqlite")  # only INTEGER keys count up in SQLite without a second index
Seconds: Double[float] = Double()  # wall clock
Blob = LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")
Document = Text().with_variant(LONGTEXT(), "mysql", "mariadb")  # JSON of a contract type, or text of any length


def _table(name: str, *parts: SchemaItem) -> Table:
    return Table(name, metadata, *parts, **MYSQL_OPTIONS)


def _job() -> Column[str]:
    return Column("job", Name, nullable=False)


# --- the cluster, the controller's lease and its position in the stream -----------------------------------------------

lease = _table(
    "lease",
    Column("name", Word, primary_key=True),
    Column("holder", String(200), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Seconds, nullable=False),  # on the database's clock
    Column("incarnation", Word, nullable=False, server_default=""),  # random, new with every epoch
)

cluster = _table(
    "cluster",  # one row, created with the database and copied with it
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("cluster_id", Word, nullable=False),
    Column("decision_floor", BigInteger, nullable=False),  # numbers up to here are used, perhaps by another copy
)

standings = _table(
    "standings",  # of hosts that were ahead of this database
    Column("host_id", Name, primary_key=True),
    Column("told_at", Seconds, nullable=False),
    Column("first_told_at", Seconds, nullable=False),  # the first since it was last settled
    Column("is_settled", Boolean, nullable=False, index=True),
    Column("cluster", Word, nullable=False),  # whose command it obeyed
    Column("command_id", String(190), nullable=False),
    Column("document", Document, nullable=False),
    # Its word is needed, for a job that is not adopted yet.
    Column("is_needed", Boolean, nullable=False, index=True, server_default="0"),
)

cursors = _table(
    "cursors",
    Column("name", Word, primary_key=True),
    Column("stream", Name, nullable=False),
    Column("position", BigInteger, nullable=False),
)

# --- observations -----------------------------------------------------------------------------------------------------

signals = _table(
    "signals",
    Column("number", Number, primary_key=True),
    Column("source", String(128), nullable=False),
    Column("incarnation", Name, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("kind", Word, nullable=False),
    _job(),
    Column("generation", Integer, nullable=False),
    Column("host_id", String(128), nullable=False),  # the host that the signal is about
    Column("observed_at", Seconds, nullable=False),
    Column("stored_at", Seconds, nullable=False),
    Column("document", Document, nullable=False),
    UniqueConstraint("source", "incarnation", "seq"),
    Index(None, "job", "generation", "observed_at"),
    Index(None, "job"),  # in the order of numbers, for lists
    Index(None, "host_id"),
    Index(None, "kind"),
)

watermarks = _table(
    "watermarks",  # every signal of a sender up to seq is stored; incarnations of different hosts may share a name
    Column("incarnation", Name, primary_key=True),
    Column("source", String(128), primary_key=True),
    Column("seq", BigInteger, nullable=False),
)

MAX_COPIES_OF = 190  # characters of a JSON list
UNKNOWN_JOBS = "*"  # a list that is longer: look at the copies

hosts = _table(
    "hosts",
    Column("host_id", Name, primary_key=True),
    Column("state", Word, nullable=False),
    Column("since", Seconds, nullable=False),
    Column("reason", Document, nullable=False),
    Column("preempt_deadline_at", Seconds, nullable=False),
    Column("joined_at", Seconds, nullable=False),
    Column("left_at", Seconds, nullable=False, server_default="0"),  # when it left in an orderly way; 0.0: it has not
    Column("address", String(128), nullable=False),
    Column("failure_domain", String(128), nullable=False),
    Column("engine_address", String(160), nullable=False),
    Column("free_port", Integer, nullable=False),
    Column("daemon_version", Name, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("interval_s", Seconds, nullable=False),
    Column("engine", Document, nullable=False),
    Column("copies", Document, nullable=False),  # every verified copy on it
    Column("version", BigInteger, nullable=False),  # new with every write, see `rows`
    Column("fabric", String(128), nullable=False, server_default=""),
    Column("memory_bytes", BigInteger, nullable=False, server_default="0"),
    Column("copies_of", String(MAX_COPIES_OF), nullable=False, server_default=UNKNOWN_JOBS),  # the jobs of `copies`
    # For looks at all hosts: with their copies ten thousand rows are sixty megabytes.
    Index("ix_hosts_in_short", "failure_domain", "host_id", "state", "left_at", "preempt_deadline_at", "copies_of"),
    Index(None, "state", "host_id", "left_at"),
)

host_reports = _table(
    "host_reports",  # data that changes with every report; of many in a short time only the newest is stored
    Column("host_id", Name, primary_key=True),
    Column("incarnation", Name, nullable=False),
    Column("sent_at", Seconds, nullable=False),  # on the host's clock
    Column("received_at", Seconds, nullable=False),  # on the supervisor's
    Column("digest", Word, nullable=False),  # of the report's data in `hosts`
    Column("workers", Document, nullable=False),  # job -> generation of the live workers
    Column("positions", Document, nullable=False),
    Column("version", BigInteger, nullable=False),
)

steady_positions = _table(
    "steady_positions",  # newer positions than `host_reports` has, of hosts that report nothing else: some hundred each
    Column("slot", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("document", Document, nullable=False),
)

vouches = _table(
    "vouches",  # which hosts a sensor received reports of, and how long before `at`
    Column("sensor", String(128), primary_key=True),
    Column("at", Seconds, nullable=False),
    Column("hosts", Document, nullable=False),
    Column("ages_ms", Document, nullable=False),  # in the order of `hosts`
)

stands = _table(
    "stands",  # what a sensor tells the others of ranks that stand still, while it has some
    Column("sensor", String(128), primary_key=True),
    Column("at", Seconds, nullable=False),
    Column("document", Document, nullable=False),
)

learned_jobs = _table(
    "learned_jobs",  # what sensors learned about jobs: durations of steps, pauses that were no faults
    Column("job", Name, primary_key=True),
    Column("told_at", Seconds, nullable=False),
    Column("learned", Document, nullable=False),
)

drains = _table(
    "drains",  # operators' drain requests; one that was granted and cancelled has no row
    Column("host_id", Name, primary_key=True),
    Column("state", Word, nullable=False),
    Column("requested_at", Seconds, nullable=False),
    Column("deadline_at", Seconds, nullable=False),
    Column("reason", Document, nullable=False),
    Column("message", Document, nullable=False),  # why it was refused
)

host_conditions = _table(
    "host_conditions",  # that stand
    Column("host_id", Name, primary_key=True),
    Column("source", String(100), primary_key=True),
    Column("kind", Name, primary_key=True),
    Column("subject", String(100), primary_key=True),
    Column("until", Seconds, nullable=False),  # 0.0: until it is ended
    Column("is_overruled", Boolean, nullable=False),  # an operator gave the host work all the same
    Column("document", Document, nullable=False),
)

host_checks = _table(
    "host_checks",  # the newest of each host
    Column("host_id", Name, primary_key=True),
    Column("state", Word, nullable=False),
    Column("action", BigInteger, nullable=False),
    Column("document", Document, nullable=False),
)

orders = _table(
    "orders",  # operators' orders to the controller; one that is over has no row
    Column("kind", Word, primary_key=True),
    Column("target", String(140), primary_key=True),  # a host, "domain:NAME", an incident, or a job
    Column("requested_at", Seconds, nullable=False),
    Column("until", Seconds, nullable=False),
    Column("state", Word, nullable=False),
    Column("awaited", Word, nullable=False),  # the kind of action that an approval is about
    Column("action_id", Word, nullable=False, server_default=""),  # of an approval's incident when it was given
    Column("reason", Document, nullable=False),
    Column("message", Document, nullable=False),  # why it was refused
)

audit_entries = _table(
    "audit_entries",  # requests of operators that change something
    Column("number", Number, primary_key=True),
    Column("at", Seconds, nullable=False),
    Column("ended_at", Seconds, nullable=False),  # 0.0: it is in progress, or its process died
    Column("role", Word, nullable=False),
    Column("token", Word, nullable=False),  # fingerprint
    Column("client", Name, nullable=False),
    Column("operation", Name, nullable=False),
    Column("target", String(200), nullable=False),
    Column("status", Integer, nullable=False),
    Column("code", Word, nullable=False),
    Column("idempotency_key", String(255), nullable=False),
    Column("claim", BigInteger, nullable=False),  # of the key; 0: none
    Column("detail", Document, nullable=False),
    Index(None, "operation"),
    Index(None, "target"),
    Index(None, "at"),
)

idempotency_keys = _table(
    "idempotency_keys",  # of operators' requests, with the answers; kept for a day
    Column("idempotency_key", String(255), primary_key=True),
    Column("digest", Word, nullable=False),  # of the request
    Column("claim", BigInteger, nullable=False, index=True),  # of the request that is carried out
    Column("created_at", Seconds, nullable=False, index=True),
    Column("status", Integer, nullable=False),  # of the answer; 0: none yet
    Column("answer", Document, nullable=False),
)

ranks = _table(
    "ranks",  # what is reported once about a rank; its position is in `host_reports`
    Column("job", Name, primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("host_id", Name, nullable=False),
    Column("exited_at", Seconds, nullable=False),
    Column("exited", Document),
    Column("marks", Document),
    Column("restored_at", Seconds, nullable=False),
    Column("restored", Document),
)

persistent_copies = _table(
    "persistent_copies",  # not owned by a host: they survive the loss of the host that wrote them
    Column("job", Name, primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("rank", Integer, primary_key=True, autoincrement=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("digest", Name, nullable=False),
)

persistent_steps = _table(
    "persistent_steps",  # the steps that have persistent copies
    Column("job", Name, primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),  # new with every copy of it that is written
)

# --- requests and decisions -------------------------------------------------------------------------------------------

jobs = _table(
    "jobs",
    Column("job", Name, primary_key=True),
    Column("spec", Document, nullable=False),
    Column("state", Word, nullable=False, index=True),
    Column("message", Document, nullable=False),
    Column("submitted_at", Seconds, nullable=False),
    Column("ended_at", Seconds, nullable=False),
    Column("stop_requested", Boolean, nullable=False),
    Column("newest_step", BigInteger, nullable=False),  # of any rank of any generation
    Column("generation", Integer, nullable=False),  # the newest granted; -1: none yet
    Column("run", Word, nullable=False, server_default=""),  # '': named after submitted_at
    Column("adopted", Document),  # the lineage of a run that this database has not seen, to continue from
    Column("loss", Word, nullable=False),  # the newest: a number, 'nan', 'inf' or '-inf'; '': none reported
    Column("loss_step", BigInteger, nullable=False),
)

job_failures = _table(
    "job_failures",
    Column("number", Number, primary_key=True),
    Column("job", Name, ForeignKey("jobs.job"), nullable=False, index=True),
    Column("generation", Integer, nullable=False),
    Column("cause", Name, nullable=False),
    Column("error_kind", Document, nullable=False),
    Column("error_message", Document, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("host_id", Name, nullable=False, server_default=""),
)

generations = _table(
    "generations",
    Column("job", Name, ForeignKey("jobs.job"), primary_key=True),
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("decision", BigInteger, nullable=False, index=True),  # the number of the decision that granted it
    Column("plan", Document, nullable=False),
    Column("granted_at", Seconds, nullable=False),
    Column("started_at", Seconds, nullable=False),  # 0.0: the start commands are not written yet
    Column("restore_step", BigInteger),
    Column("lineage", Document),
    Column("placement", Document),
)

incidents = _table(
    "incidents",
    Column("number", Number, primary_key=True, autoincrement=False),
    _job(),
    Column("state", Word, nullable=False),
    Column("closed", Boolean, nullable=False, index=True),
    Column("decided_at", Seconds, nullable=False),  # first decision; 0.0: none yet
    Column("host_id", Name, nullable=False, server_default=""),
    Column("cause", Name, nullable=False, server_default=""),
    Column("opened_at", Seconds, nullable=False, server_default="0"),
    Column("document", Document, nullable=False),
    Index(None, "job"),
    Index(None, "host_id"),
    Index(None, "cause"),
    Index(None, "state"),
)

incident_changes = _table(
    "incident_changes",
    Column("number", Number, primary_key=True),
    Column("incident", Number, ForeignKey("incidents.number"), nullable=False, index=True),
    Column("at", Seconds, nullable=False),
    Column("state", Word, nullable=False),
    Column("cause", Name, nullable=False),
    Column("message", Document, nullable=False),
)

decisions = _table(
    "decisions",
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("incident", BigInteger, index=True),
    _job(),
    Column("kind", Word, nullable=False),
    Column("at", Seconds, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("document", Document, nullable=False),
    Index(None, "job"),
    Index(None, "kind"),
)

rounds = _table(
    "rounds",  # the inputs of the policy's rounds, for replays; bounded
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("at", Seconds, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("version", Name, nullable=False),  # of the release that decided
    Column("signals", Document, nullable=False),  # their keys, in the order of reading
    Column("inputs", Blob, nullable=False),  # view and settings, compressed; large ones continue in round_pieces
    Column("total_bytes", BigInteger, nullable=False, index=True),  # of this row and all rows ever before it
)

round_pieces = _table(
    "round_pieces",  # the rest of a round's inputs that do not fit its row
    Column("round", BigInteger, primary_key=True, autoincrement=False),
    Column("piece", Integer, primary_key=True, autoincrement=False),
    Column("data", Blob, nullable=False),
)

# --- actions ----------------------------------------------------------------------------------------------------------

actions = _table(
    "actions",
    Column("number", Number, ForeignKey("decisions.number"), primary_key=True, autoincrement=False),
    Column("incident", BigInteger, index=True),
    _job(),
    Column("plan", Document, nullable=False),
    Column("state", Word, nullable=False),
    Column("ended", Boolean, nullable=False, index=True),
    Column("phase", Word, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("version", Integer, nullable=False),  # compare-and-set
    Column("message", Document, nullable=False),
    Column("started_at", Seconds, nullable=False),
    Column("ended_at", Seconds, nullable=False),
    Index(None, "job"),
    Index(None, "state"),
)

action_changes = _table(
    "action_changes",
    Column("number", Number, primary_key=True),
    Column("action", Number, ForeignKey("actions.number"), nullable=False, index=True),
    Column("at", Seconds, nullable=False),
    Column("phase", Word, nullable=False),
    Column("state", Word, nullable=False),
    Column("message", Document, nullable=False),
)

commands = _table(
    "commands",  # the outbox
    Column("number", Number, primary_key=True),
    Column("command_id", String(190), nullable=False),
    Column("action", Number, ForeignKey("actions.number"), nullable=False, index=True),
    Column("phase", Word, nullable=False),
    Column("host_id", Name, nullable=False),
    Column("document", Document, nullable=False),
    Column("created_at", Seconds, nullable=False),
    Column("dispatched_at", Seconds, nullable=False),  # first handed out; 0.0: never
    Column("is_open", Boolean, nullable=False),  # has no final answer, and its action has not ended
    Column("progress", Integer, nullable=False),  # 0 none, 1 acknowledged, 2 final answer
    Column("answered_at", Seconds, nullable=False),
    Column("answer", Document),
    Column("answer_revision", BigInteger, nullable=False, server_default="0"),  # the log's, at the last answer
    UniqueConstraint("command_id"),
    Index(None, "action", "answer_revision"),
    Index(None, "is_open", "host_id"),
    Index(None, "host_id", "progress", "number"),
)

# --- the logs ---------------------------------------------------------------------------------------------------------

log_head = _table(
    "log_head",  # one row; its lock orders the writers of the log
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last_event", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),  # grows with every change that a view may show
    Column("conditions_revision", BigInteger, nullable=False, server_default="0"),  # at their last change
)

table_marks = _table(
    "table_marks",  # new with every transaction that wrote the table, see `kept_reads`
    Column("name", Word, primary_key=True),
    Column("mark", BigInteger, nullable=False),
)

events = _table(
    "events",
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("at", Seconds, nullable=False),
    Column("kind", Word, nullable=False),
    _job(),
    Column("document", Document, nullable=False),
    Index(None, "job"),
    Index(None, "kind"),  # in the order of numbers, like those of a job, and those of a kind and a job
    Index(None, "kind", "job"),
)

goodput_accounts = _table(
    "goodput_accounts",  # what `goodput` has worked out from a job's events so far
    Column("job", Name, primary_key=True),
    Column("version", Integer, nullable=False),  # of its form and meaning
    Column("position", BigInteger, nullable=False),  # the last event in it
    Column("document", Blob, nullable=False),
)

goodput_ratios = _table(
    "goodput_ratios",
    Column("job", Name, primary_key=True),
    Column("ratio", Double, nullable=False),
)

bus_streams = _table(
    "bus_streams",
    Column("name", Word, primary_key=True),
    Column("stream", Name, nullable=False),
    Column("head", BigInteger, nullable=False),  # position of the newest message
    Column("tail", BigInteger, nullable=False),  # messages up to here are removed
)

bus_messages = _table(
    "bus_messages",
    Column("position", Number, primary_key=True, autoincrement=False),
    Column("document", Document, nullable=False),
)
