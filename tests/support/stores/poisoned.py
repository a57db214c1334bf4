"""A database with a row in each table that is read, and rows of it that somebody changed so that nobody can decode
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import insert, select, text, update
from support.stores.job_stores import Stores

from flyball.contracts.checkpoints import RestoreReport, ShardCopy, Tier
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainRequest
from flyball.contracts.reports.host_checks import CheckState, HostCheck
from flyball.contracts.reports.standings import HostStanding, LastObeyed
from services.controller.round.view import JobChange, PastFailure
from services.record.audit_records import Attempt
from services.record.codec import dump
from services.store.decisions.audit_store import SqlAuditLog
from services.store.decisions.condition_store import SqlConditionStore
from services.store.decisions.drain_store import SqlDrainStore
from services.store.decisions.order_store import SqlOrderStore
from services.store.decisions.standing_store import SqlStandings
from services.store.reports import persistent_steps
from services.store.sql import tables

POISONED = [
    ("jobs", "spec", '{"job": "job", "argv": 7}'),
    ("jobs", "spec", "nonsense"),
    ("jobs", "state", "dancing"),
    ("generations", "plan", "[]"),
    ("generations", "lineage", '[{"generation": "x"}]'),
    ("incidents", "document", '{"incident_id": "inc-1"}'),
    ("actions", "plan", '{"kind": "dance"}'),
    ("commands", "document", '{"command_id": 7}'),
    ("commands", "answer", "\\ud800"),
    ("hosts", "copies", '[{"job": "job", "step": -1}]'),
    ("hosts", "state", "dancing"),
    ("host_reports", "workers", "[1]"),
    ("host_reports", "positions", '[["job", 1, [[0, 1, 2, 99, 4.0]]]]'),
    ("host_conditions", "document", "{}"),
    ("standings", "document", '{"host_id": "host-a", "obeyed": {"epoch": 9223372036854775807}}'),
    ("orders", "kind", "dance"),
    ("vouches", "hosts", "{}"),
    ("drains", "state", "dancing"),
    ("events", "document", "{}"),
    ("cluster", "decision_floor", 2**63 - 1),
]


def fill(stores: Stores) -> None:
    """A job that restarts, and hosts that say more."""
    make, clock = stores.make, stores.clock
    stores.run_job()
    stores.begin_restart()
    stores.actions.record(make.update("act-2.stop.host-a.1"))
    condition = HostCondition("hot", Severity.INFO, "It is warm.", "api:operator", 1.0)
    SqlConditionStore(stores.db).begin("host-a", condition)
    SqlOrderStore(stores.db).cordon("host-b", "for a test", make.T)
    SqlDrainStore(stores.db).drain("host-b", DrainRequest(reason="for a test"), make.T)
    SqlStandings(stores.db, clock).record(
        HostStanding("host-b", "i", 1.0, LastObeyed("", 1, "act-deadbeef-9.stop.host-b.1"), 0.0)
    )
    stores.status.vouch(sensor="sensor.s", at=make.T, ages_ms=[1, 2], hosts=["host-a", "host-b"])
    failure = PastFailure(1, "worker_killed", "", "", 7, "host-a")
    stores.commit(jobs=(JobChange("job", stores.decisions.load_view().jobs[0].state, "restarts", failure),))
    audit = SqlAuditLog(stores.db, clock)
    audit.end(
        audit.begin(Attempt("operator", "t", "::1", "drainHost", "host-b", "{}", "key", "d")).number, 202, "", b""
    )
    copy = ShardCopy("job", 1, 5, 0, Tier.PERSISTENT, "", 1, "d")
    restored = RestoreReport("job", 1, 0, 5, Tier.DISK, "host-a", 1, 0, 0.1, make.T)
    check = HostCheck(CheckState.PASSED, make.T, "act-1")
    with stores.db.write() as connection:
        persistent_steps.store(connection, [copy])
        connection.execute(
            insert(tables.host_checks).values(host_id="host-a", state=check.state.value, action=0, document=dump(check))
        )
        mine = (tables.ranks.c.job == "job", tables.ranks.c.rank == 0)
        connection.execute(update(tables.ranks).where(*mine).values(restored=dump(restored), restored_at=make.T))


def poison(stores: Stores, table: str, column: str, value: object) -> None:
    """Change a column of all rows."""
    with stores.db.write() as connection:
        changed = connection.execute(update(tables.metadata.tables[table]).values({column: value}))
        assert changed.rowcount, f"{table} has no row to poison"


@contextmanager
def broken_text(stores: Stores, table: str, column: str) -> Iterator[None]:
    """For the block, a column of all rows is bytes that are no UTF-8."""
    bad = "CAST(x'7BFF7D' AS TEXT)" if stores.db.is_sqlite else "x'7BEDA0807D'"  # MariaDB takes surrogates only
    of = tables.metadata.tables[table]
    keys = list(of.primary_key.columns)
    with stores.db.write() as connection:
        rows = connection.execute(select(*keys, of.columns[column].label("was"))).all()
        connection.execute(text(f"UPDATE {table} SET {column} = {bad}"))
    yield
    with stores.db.write() as connection:
        for row in rows:
            same = [key == value for key, value in zip(keys, row, strict=False)]
            connection.execute(update(of).where(*same).values({column: row.was}))


def decoded_columns() -> dict[str, list[str]]:
    """Return table -> its columns that are read as more than text: documents, and words of an enum. Without keys."""
    kinds = (tables.Document, tables.Word)
    found = {
        name: [column.name for column in table.columns if column.type in kinds and not column.primary_key]
        for name, table in tables.metadata.tables.items()
    }
    return {name: columns for name, columns in sorted(found.items()) if columns}
