"""A row that cannot be decoded, whoever wrote it, ends no loop: it is left out and named, and the rest goes on."""

from __future__ import annotations

import json

import pytest
import sqlalchemy
from sqlalchemy import select, text, update
from support.stores.job_stores import SEALS
from support.stores.poisoned import POISONED, broken_text, decoded_columns, fill, poison

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.events import EventKind
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import HostChange, JobChange, PolicySettings
from services.controller.updates.unreadable_rows import ROW_UNREADABLE
from services.record.codec import load
from services.record.retention_rules import RetentionSettings
from services.runtime.wakeup import LocalWakeup
from services.store.actions.action_store import SqlActionStore
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.read.read_models import SqlReadModels
from services.store.reports.placements import SqlPlacements
from services.store.retention.sweep import Sweeper
from services.store.sql import tables
from services.store.sql.broken_text import String, Text

MAX_TURNS = 200  # transactions of a sweep


@pytest.fixture
def full(stores):  # type: ignore[no-untyped-def]
    fill(stores)
    return stores


def restarted(stores) -> tuple[ControllerLoop, Executor]:  # type: ignore[no-untyped-def]
    """The loops of a supervisor that starts on this database."""
    wakeup, clock = LocalWakeup(), stores.clock
    loop = ControllerLoop(
        store=SqlDecisionStore(stores.db, clock, SEALS),
        bus=EmbeddedBus(stores.db),
        wakeup=wakeup,
        clock=clock,
        settings=PolicySettings(spare_fresh_s=1e9),
        holder="controller#2",
        lease_ttl_s=3600.0,
    )
    return loop, Executor(store=SqlActionStore(stores.db, clock, SEALS), wakeup=wakeup, clock=clock)


def run_all(stores, loop: ControllerLoop, executor: Executor) -> str:  # type: ignore[no-untyped-def]
    """All loops of a supervisor, and what its sensor and its actuator read. Returns what the incidents say before those
    without a job are swept."""
    for _ in range(3):
        loop.run_once()
        executor.run_once()
        stores.clock.sleep(5.0)
    for host_id in ("host-a", "host-b", "host-c"):
        stores.other_actions().commands_for(host_id, stores.clock.wall_s())
    SqlPlacements(stores.db).read()
    stores.log.read(None, 0, 1000)
    said = _messages(stores, tables.incidents.c.document)
    sweeper = Sweeper(stores.db, RetentionSettings(), stores.clock, "controller#2")
    for turn, _ in enumerate(sweeper.sweep(stores.clock.wall_s() + 1e9)):
        assert turn < MAX_TURNS, "it sweeps for ever"
    stores.status.expected_hosts()
    now = stores.clock.wall_s()
    stores.status.record_reports([(stores.make.report(name, sent_at=now), now) for name in ("host-a", "host-b")])
    return said


@pytest.mark.parametrize(("table", "column", "value"), POISONED)
def test_a_poisoned_row_ends_no_loop(full, make, table: str, column: str, value: object) -> None:  # type: ignore[no-untyped-def]
    stores = full
    poison(stores, table, column, value)
    loop, executor = restarted(stores)
    stores.jobs.submit(make.spec(job="another", nnodes=1, nproc_per_node=1), stores.clock.wall_s())
    stores.status.record_reports([(make.report("host-c"), stores.clock.wall_s())])
    said = run_all(stores, loop, executor)
    view = SqlDecisionStore(stores.db, stores.clock, SEALS).load_view()
    (other,) = (job for job in view.jobs if job.spec.job == "another")
    assert other.state is JobState.RUNNING, "another job is decided about"
    if table in ("cluster", "events"):
        return
    if column == "document" and table == "commands":
        assert "cannot be read" in _messages(stores, tables.actions.c.message)
    else:  # which may be over by now
        assert f"of {table}" in said


@pytest.mark.parametrize("table", decoded_columns())
def test_text_that_is_no_text_ends_no_loop(full, make, table: str) -> None:  # type: ignore[no-untyped-def]
    """SQLite stores any bytes as text, and its driver raises for the whole query."""
    for column in decoded_columns()[table]:
        with broken_text(full, table, column):
            run_all(full, *restarted(full))


@pytest.mark.parametrize("field", ["action_id", "incident_id", "part_of", "parts"])
def test_an_incident_that_names_what_has_no_number_is_set_aside(full, field: str) -> None:  # type: ignore[no-untyped-def]
    with full.db.read() as connection:
        document = json.loads(connection.scalar(select(tables.incidents.c.document)))
    poison(
        full, "incidents", "document", json.dumps(document | {field: ["act-two"] if field == "parts" else "act-two"})
    )
    run_all(full, *restarted(full))
    assert "inc-1 of incidents (NotFound: 'act-two' names nothing." in _messages(full, tables.incidents.c.document)
    assert "inc-1" not in {one["incident_id"] for one in SqlReadModels(full.db).incidents(None)}


def test_each_column_of_text_is_read_as_text(full) -> None:  # type: ignore[no-untyped-def]
    """Also where somebody wrote a blob, which SQLite keeps as one: names of two kinds cannot be sorted."""
    of_text = [
        column
        for table in tables.metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, sqlalchemy.String)
    ]
    assert of_text and {column.name for column in of_text if type(column.type) not in (String, Text)} == set()
    if not full.db.is_sqlite:
        return
    with full.db.write() as connection:
        connection.execute(text("UPDATE jobs SET message = x'68C3A9FF', loss = x'302E35'"))
        assert connection.execute(select(tables.jobs.c.message, tables.jobs.c.loss)).one() == ("h\u00e9\x1a", "0.5")


def test_a_host_or_job_whose_state_cannot_be_read_may_change(full) -> None:  # type: ignore[no-untyped-def]
    for table in ("hosts", "jobs"):
        poison(full, table, "state", "dancing")
    silent = HostChange("host-a", HostState.SILENT, "no report")
    full.commit(hosts=(silent,), jobs=(JobChange("job", JobState.FAILED, "for a test"),))
    with full.db.read() as connection:
        states = dict(connection.execute(select(tables.hosts.c.host_id, tables.hosts.c.state)).all())
        assert states == {"host-a": "silent", "host-b": "dancing"}
        assert connection.scalar(select(tables.jobs.c.state)) == "dancing", "it is left alone"


def test_a_key_that_is_no_text_ends_no_sweep(full) -> None:  # type: ignore[no-untyped-def]
    """No row matches the key as it was read: its removal is tried once, not for ever."""
    if not full.db.is_sqlite:
        pytest.skip("MariaDB compares what it stores")
    with full.db.write() as connection:
        connection.execute(text("UPDATE idempotency_keys SET idempotency_key = CAST(x'FF' AS TEXT)"))
    run_all(full, *restarted(full))


def _messages(stores, column) -> str:  # type: ignore[no-untyped-def]
    with stores.db.read() as connection:
        return " ".join(connection.scalars(select(column)))


PLANS = {"its plan": ("actions",), "its plan and decision": ("actions", "decisions")}


@pytest.mark.parametrize("lost", PLANS.values(), ids=PLANS)
def test_an_action_whose_plan_cannot_be_read_fails_and_the_job_goes_on(full, lost) -> None:  # type: ignore[no-untyped-def]
    stores = full
    _poison_plan(stores, lost, 2)
    loop, executor = restarted(stores)
    for _ in range(4):
        loop.run_once()
        executor.run_once()
        stores.clock.sleep(5.0)
    with stores.db.read() as connection:
        row = connection.execute(select(tables.actions).where(tables.actions.c.number == 2)).one()
        fresh = connection.execute(select(tables.actions).where(tables.actions.c.number > 2)).all()
        open_ids = set(connection.scalars(select(tables.commands.c.action).where(tables.commands.c.is_open)))
    assert (row.state, bool(row.ended), row.ended_at > 0.0) == ("failed", True, True)
    assert row.message == "Its plan cannot be read: see the incident, and the supervisor's log."
    assert [new.job for new in fresh][:1] == ["job"] and 2 not in open_ids, "and the job is decided about again"
    ended = [event for _, event in stores.log.read("job", 0, 1000) if event.kind is EventKind.ACTION_ENDED]
    assert {"act-2": ("failed", "restart_in_place")}.items() <= {
        event.data["action_id"]: (event.data["state"], event.data["kind"]) for event in ended
    }.items()
    assert "act-2 of actions" in _messages(stores, tables.incidents.c.document)


@pytest.mark.parametrize("lost", PLANS.values(), ids=PLANS)
def test_a_start_whose_plan_cannot_be_read_fails_and_the_job_is_started_again(stores, make, lost) -> None:  # type: ignore[no-untyped-def]
    stores.jobs.submit(make.spec(), make.T)
    for host_id in ("host-a", "host-b"):
        stores.status.record_reports([(make.report(host_id), make.T)])
    start = make.start()
    running = JobChange("job", JobState.RUNNING, "training")
    stores.commit(decisions=(start,), steps={"act-1": make.start_step(start)}, jobs=(running,))
    _poison_plan(stores, lost, 1)
    loop, executor = restarted(stores)
    for _ in range(8):
        loop.run_once()
        executor.run_once()
        stores.clock.sleep(10.0)
        now = stores.clock.wall_s()
        stores.status.record_reports([(make.report(name, sent_at=now), now) for name in ("host-a", "host-b")])
    with stores.db.read() as connection:
        (first, *fresh) = connection.execute(select(tables.actions).order_by(tables.actions.c.number)).all()
    assert first.state == "failed" and fresh, "another generation is started"


def _poison_plan(stores, lost, number: int) -> None:  # type: ignore[no-untyped-def]
    column = {"actions": "plan", "decisions": "document"}
    with stores.db.write() as connection:
        for name in lost:
            table = tables.metadata.tables[name]
            connection.execute(update(table).where(table.c.number == number).values({column[name]: "{}"}))


def test_the_incident_ends_with_the_row(full, make) -> None:  # type: ignore[no-untyped-def]
    stores = full
    with stores.db.read() as connection:
        good = connection.scalar(select(tables.jobs.c.spec))
    poison(stores, "jobs", "spec", "{}")
    loop, _ = restarted(stores)
    loop.run_once()
    store = SqlDecisionStore(stores.db, stores.clock, SEALS)
    (found,) = (i for i in store.load_view().incidents if i.cause == ROW_UNREADABLE)
    assert "1 row of the database" in found.message and "job of jobs" in found.message
    poison(stores, "jobs", "spec", good)
    stores.clock.sleep(60.0)
    restarted(stores)[0].run_once()
    view = store.load_view()
    assert ROW_UNREADABLE not in {i.cause for i in view.incidents}
    assert [job.spec.job for job in view.jobs] == ["job"]


def test_hosts_of_a_job_that_cannot_be_read_get_no_other_work(full, make) -> None:  # type: ignore[no-untyped-def]
    stores = full
    poison(stores, "jobs", "spec", "{}")
    stores.jobs.submit(make.spec(job="another", nnodes=1, nproc_per_node=1), stores.clock.wall_s())
    view = SqlDecisionStore(stores.db, stores.clock, SEALS).load_view()
    busy = {host.host_id for host in view.hosts if host.job == "job"}
    with stores.db.read() as connection:
        running = {
            row.host_id
            for row in connection.execute(select(tables.host_reports))
            if "job" in load(row.workers, dict[str, int])
        }
    assert busy == running


def test_an_end_that_cannot_be_read_is_left_out(stores, make) -> None:  # type: ignore[no-untyped-def]
    stores.run_job()
    stores.commit(signals=(make.signal(),))
    poison(stores, "ranks", "exited", '{"type": "worker_exited"}')
    view = SqlDecisionStore(stores.db, stores.clock, SEALS).load_view()
    assert [row.table for row in view.unreadable] == ["ranks"] and view.jobs
