"""What is asked of a database all the time takes no longer after a year: each statement of a round, a page and a sweep
is explained, and its work is compared between a short history and a longer one."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from support.clocks.manual import ManualClock
from support.servers.api_here import ApiHere
from support.stores.job_stores import SEALS, Stores
from support.stores.made_values import Make

from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.record.retention_rules import RetentionSettings
from services.runtime.wakeup import LocalWakeup
from services.store.actions.action_store import SqlActionStore
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.retention.sweep import Sweeper
from services.store.sql import events, tables
from services.store.sql.database import Database

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from api_bench.database import fill
from year_bench.rows import all_rows
from year_bench.world import addresses

GROWING = [
    table.name
    for table in (
        *(tables.events, tables.signals, tables.commands, tables.decisions, tables.actions, tables.action_changes),
        *(tables.incidents, tables.incident_changes, tables.audit_entries),
    )
]
NOW = 2_000_000_000.0
SHORT, LONG = 0.02, 0.05  # years; pages are full in both
GROWTH = 1.5
LEAST = 5000  # rows on a server, which may scan what is smaller; steps of SQLite's machine, of which a page takes some


class Asked:
    """Every statement that databases received, with values for it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        def note(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:  # noqa: ANN401
            self.found.setdefault(statement, values)

        event.listen(Engine, "before_cursor_execute", note)
        try:
            yield
        finally:
            event.remove(Engine, "before_cursor_execute", note)


def history(url: str, years: float) -> Database:
    db = Database(url)
    fill(db, all_rows(years, NOW))
    if not db.is_sqlite:
        with db.write() as connection:
            connection.execute(text(f"ANALYZE TABLE {', '.join(GROWING)}"))
    return db


def use(db: Database, folder: Path) -> dict[str, Any]:
    """Do what services do all the time, and return the statements."""
    clock, asked, wakeup = ManualClock(NOW), Asked(), LocalWakeup()
    stores = Stores(db, clock, Make())
    store, bus = SqlDecisionStore(db, clock, SEALS), EmbeddedBus(db)
    loop = ControllerLoop(
        store=store, bus=bus, wakeup=wakeup, clock=clock, settings=PolicySettings(), holder="a#1", lease_ttl_s=1e6
    )
    executor = Executor(store=SqlActionStore(db, clock, SEALS), wakeup=wakeup, clock=clock)
    sweeper = Sweeper(db, RetentionSettings(history_days=400.0, audit_days=400.0), clock, "a#1")
    assert sum(sweeper.sweep(NOW)) > 0
    with asked.noted():
        loop.run_once()
        executor.run_once()
        with db.write() as connection:
            events.append(connection, [])
        loop.run_once()
        assert {reply.status_code for reply in ApiHere(stores, folder).get(addresses()).values()} == {200}
        assert sum(sweeper.sweep(NOW)) == 0, "nothing is due"
    return asked.found


def plan(db: Database, statement: str, values: Any) -> list[str]:  # noqa: ANN401
    """The tables that a statement reads whole, or walks by an index from one end."""
    with db.read() as connection:
        if db.is_sqlite:
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            return [row.detail for row in rows if row.detail.startswith("SCAN")]
        rows = connection.exec_driver_sql(f"EXPLAIN {statement}", values).all()
        return [f"{row.type} {row.table} {row.key}" for row in rows if row.type in ("ALL", "index")]


def work(db: Database, statement: str, values: Any) -> int:  # noqa: ANN401
    """How much a query reads: of a server the rows, of SQLite the steps of its machine."""
    with db.read() as connection:
        if not db.is_sqlite:
            connection.exec_driver_sql("FLUSH STATUS")
            connection.exec_driver_sql(statement, values).all()
            counts = connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'")).all()
            return sum(int(value) for _, value in counts)
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 10
            return 0

        raw = connection.connection.dbapi_connection
        assert isinstance(raw, sqlite3.Connection)
        raw.set_progress_handler(step, 10)
        try:
            connection.exec_driver_sql(statement, values).all()
        finally:
            raw.set_progress_handler(None, 0)
        return steps


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("mariadb", marks=pytest.mark.processes)])
def test_no_statement_reads_more_the_longer_the_history(
    kind: str, new_ready_url: Callable[[str], str], tmp_path: Path
) -> None:
    short, long = (history(new_ready_url(kind), years) for years in (SHORT, LONG))
    (before, after) = (use(db, tmp_path) for db in (short, long))
    wrong = []
    for statement, values in after.items():
        if not statement.startswith("SELECT"):
            continue
        scans = [one for one in plan(long, statement, values) if any(table in one.split() for table in GROWING)]
        late = work(long, statement, values)
        early = work(short, statement, before[statement]) if statement in before else late
        scans_all = bool(scans) and "LIMIT" not in statement and (long.is_sqlite or late > LEAST)
        if late > LEAST + GROWTH * early or scans_all:
            wrong.append(f"{early} -> {late}: {statement}\n   {scans or plan(long, statement, values)}\n   {values}")
    for db in (short, long):
        db.close()
    assert not wrong, "\n".join(wrong)
