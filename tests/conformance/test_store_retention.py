"""Only what is over is merged or removed."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import delete, func, insert, select
from support.clocks.manual import ManualClock
from support.stores.poisoned import broken_text

from flyball.contracts.cluster import Again, HostState, JobSpec, JobState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainRequest
from flyball.contracts.reports.standings import HostStanding, LastObeyed
from services.controller.replay import RoundInputs
from services.controller.round.view import HostChange, JobChange, Outcome, PolicySettings
from services.record.codec import load
from services.record.retention_rules import DAY_S, RetentionSettings
from services.store.decisions import rounds as round_store
from services.store.decisions.condition_store import SqlConditionStore
from services.store.decisions.drain_store import SqlDrainStore
from services.store.decisions.order_store import SqlOrderStore
from services.store.decisions.standing_store import SqlStandings
from services.store.read.read_models import SqlReadModels
from services.store.reports.goodput_accounts import SqlGoodputAccounts
from services.store.retention import removal
from services.store.retention.host_removal import HOSTS_AT_ONCE, SqlHostRemoval
from services.store.retention.sweep import Sweeper
from services.store.sql import tables

T = 1000.0
WEEK_S = 7 * DAY_S
YEAR_S = 365 * DAY_S


def sweep(stores, now: float, **settings: float) -> int:
    sweeper = Sweeper(stores.db, RetentionSettings(**settings), stores.clock, "controller#1")
    return sum(sweeper.sweep(now))


def count(stores, table) -> int:
    with stores.db.read() as connection:
        return int(connection.scalar(select(func.count()).select_from(table)))


def step_event(step: int, at: float) -> Event:
    data = {"first_step": step, "completed_at": [at], "slowest_step": step, "ranks": 4, "sensor": "s"}
    return Event(at, EventKind.STEPS, "job", 1, data=data)


def test_step_events_are_merged_once_they_are_an_hour_old(stores) -> None:
    stores.log.append([step_event(step, 10_000.0 + step) for step in range(3000)])
    assert sweep(stores, 13_600.0) == 0, "none is an hour old"
    assert sweep(stores, 16_000.0) == 2000 - 4
    found = [event for _, event in stores.log.read("job", 0, 10_000)]
    steps = [step for event in found for step, _ in enumerate(event.data["completed_at"], event.data["first_step"])]
    assert steps == list(range(3000))
    assert sweep(stores, 16_000.0) == 0, "it continues where it was"
    stores.log.append([step_event(step, 10_000.0 + step) for step in range(3000, 3100)])
    numbers = [number for number, _ in stores.log.read("job", 0, 10_000)]
    assert numbers == sorted(numbers) and numbers[-1] == stores.log.last()
    assert sweep(stores, 60_000.0) > 500


def test_signals_go_after_a_week_and_are_still_recognized(stores, make) -> None:
    stores.run_job()
    old = make.signal(incarnation="daemon-host-a")
    stores.commit(signals=(old,))
    assert stores.decisions.unseen([old]) == []
    assert count(stores, tables.signals) == 1
    sweep(stores, T + WEEK_S - 1)
    assert count(stores, tables.signals) == 1
    sweep(stores, T + WEEK_S + 1)
    assert count(stores, tables.signals) == 0
    assert stores.decisions.unseen([old]) == [], "one that arrives again does nothing"
    new = make.signal(2, incarnation="daemon-host-a")
    assert stores.decisions.unseen([new]) == [new]


def test_rounds_go_with_the_signals_that_they_read(stores, make) -> None:
    stores.run_job()
    for seq in range(1, 6):
        stores.clock.now_s += 1.0
        signal = make.signal(seq)
        inputs = RoundInputs(stores.decisions.load_view(), PolicySettings())
        stores.decisions.commit(
            epoch=stores.epoch,
            now=stores.clock.wall_s(),
            signals=(signal,),
            cursor=None,
            outcome=Outcome(),
            first_steps={},
            inputs=inputs,
        )
    sweep(stores, T + 60.0, max_signals=2)
    assert count(stores, tables.signals) == 2
    with stores.db.read() as connection:
        kept = list(round_store.read(connection))
    assert [signal.seq for one in kept for signal in one.signals] == [4, 5], "what is kept can be replayed"


def test_commands_go_after_a_week_and_decisions_stay(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    finished, under_way = 2, 2
    assert count(stores, tables.commands) == finished + under_way
    sweep(stores, T + WEEK_S + 1)
    assert count(stores, tables.commands) == finished + under_way, "the last ones that the hosts obeyed"
    for host in ("host-a", "host-b"):
        stores.actions.record(make.update(f"act-2.stop.{host}.1"))
    sweep(stores, T + WEEK_S + 1)
    assert count(stores, tables.commands) == under_way, "an action that has not ended keeps them"
    assert count(stores, tables.decisions) == 2
    shown = SqlReadModels(stores.db).decision("dec-1")
    assert shown["decision_id"] == "dec-1" and shown["reason"]


def test_a_job_goes_a_year_after_its_end_with_everything_of_it(stores, make) -> None:
    stores.run_job()
    stores.clock.now_s = T + 10
    stores.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "all ranks ended"),))
    stores.jobs.submit(make.spec(job="other"), T)
    sweep(stores, T + YEAR_S)
    assert count(stores, tables.jobs) == 2
    sweep(stores, T + YEAR_S + 60)
    assert count(stores, tables.jobs) == 2, "its decision is the newest: its number would be given out again"
    with stores.db.write() as connection:
        row = {"number": 9, "incident": None, "job": "other", "kind": "hold", "at": T, "epoch": 1, "document": "{}"}
        connection.execute(insert(tables.decisions).values(row))
    stores.status.record_reports([(make.report("host-a", sent_at=T + YEAR_S), T + YEAR_S)])
    sweep(stores, T + YEAR_S + 60)
    assert count(stores, tables.jobs) == 2, "its command is the last that host-a obeyed"
    with stores.db.write() as connection:
        connection.execute(delete(tables.hosts))
    sweep(stores, T + YEAR_S + 60)
    with stores.db.read() as connection:
        for table in tables.metadata.tables.values():
            if "job" in table.c:
                assert connection.scalars(select(table.c.job).where(table.c.job == "job")).all() == [], table.name
    assert count(stores, tables.jobs) == 1
    assert count(stores, tables.commands) == count(stores, tables.action_changes) == 0


def let_it_go(stores) -> None:
    """Have nothing keep the job but its age."""
    with stores.db.write() as connection:
        row = {"number": 9, "incident": None, "job": "other", "kind": "hold", "at": T, "epoch": 1, "document": "{}"}
        connection.execute(insert(tables.decisions).values(row))
        connection.execute(delete(tables.hosts))


def test_a_job_that_goes_on_during_a_sweep_stays(stores, make) -> None:
    """It was listed as over. What is left of its history at that moment stays, and all that it needs."""
    stores.run_job()
    stores.clock.now_s = T + 10
    stores.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "all ranks ended"),))
    let_it_go(stores)
    removing = removal.remove_jobs(stores.db, T + YEAR_S)
    assert next(removing), "its commands are gone"
    with stores.db.read() as connection:
        spec = load(connection.scalar(select(tables.jobs.c.spec)), JobSpec)
    assert stores.jobs.submit(spec, T + YEAR_S, Again.RESUME)
    before = {table.name: count(stores, table) for table in tables.metadata.sorted_tables}
    assert sum(removing) == 0
    assert {table.name: count(stores, table) for table in tables.metadata.sorted_tables} == before
    assert count(stores, tables.generations) == 1


def test_a_running_job_stays_however_old_it_is(stores) -> None:
    stores.run_job()
    before = {table.name: count(stores, table) for table in (tables.jobs, tables.generations, tables.ranks)}
    sweep(stores, T + 5 * YEAR_S)
    assert {table.name: count(stores, table) for table in (tables.jobs, tables.generations, tables.ranks)} == before


def test_dead_hosts_are_forgotten_after_a_week(stores, make) -> None:
    stores.run_job()  # on host-a and host-b
    stores.status.record_reports([(make.report("host-c"), T), (make.report("host-d"), T), (make.report("host-e"), T)])
    stores.commit(hosts=(HostChange("host-e", HostState.CORDONED, "its fan is loud"),))
    stores.status.record_reports([(make.report("host-d", sent_at=T + WEEK_S), T + WEEK_S)])
    sweep(stores, T + WEEK_S + 60)
    found = {host["host_id"] for host in SqlReadModels(stores.db).hosts(also_left=True)}
    assert found == {"host-a", "host-b", "host-d", "host-e"}, "ranks, reports and an operator's cordon keep a host"
    assert {host.host_id for host in stores.other_decisions().load_view().hosts} == found
    states = SqlReadModels(stores.db).host_states()
    assert (states["cordoned"], states["silent"], sum(states.values())) == (1, 0, 4)


def test_dead_hosts_go_in_small_transactions_and_one_that_comes_back_stays(stores, make) -> None:
    """Each transaction holds the head of the event log, and looks again."""
    names = [f"host-{number:03}" for number in range(2 * HOSTS_AT_ONCE + 20)]
    stores.status.record_reports([(make.report(name), T) for name in names])
    removing = SqlHostRemoval(stores.db).remove_dead(T + WEEK_S)
    assert next(removing) == HOSTS_AT_ONCE
    stores.status.record_reports([(make.report(names[-1], sent_at=T + WEEK_S), T + WEEK_S)])
    assert list(removing) == [HOSTS_AT_ONCE, 19]
    assert [host["host_id"] for host in SqlReadModels(stores.db).hosts(also_left=True)] == [names[-1]]


def test_a_host_whose_name_is_no_text_ends_no_sweep(stores, make) -> None:
    """It is read as another name, of which there is no row."""
    stores.status.record_reports([(make.report("host-a"), T)])
    with broken_text(stores, "hosts", "host_id"):
        assert list(SqlHostRemoval(stores.db).remove_dead(T + WEEK_S)) == [1]


def test_a_host_is_removed_at_once_by_an_operator(stores, make) -> None:
    stores.run_job()
    stores.status.record_reports([(make.report("host-c"), T)])
    removal = SqlHostRemoval(stores.db)
    with pytest.raises(NotFound, match="no host 'host-x'"):
        removal.remove("host-x", T)
    with pytest.raises(Conflict, match="has ranks of job job"):
        removal.remove("host-a", T + 100)
    with pytest.raises(Conflict, match="reported 3 s ago"):
        removal.remove("host-c", T + 3)
    revision = stores.decisions.revision()
    removal.remove("host-c", T + 60)
    assert stores.decisions.revision() > revision
    with pytest.raises(NotFound):
        SqlReadModels(stores.db).host("host-c")
    stores.status.record_reports([(make.report("host-c", sent_at=T + 61), T + 61)])
    assert SqlReadModels(stores.db).host("host-c")["state"] == "healthy", "it may join again"


def test_a_removed_host_leaves_nothing_behind(stores, make) -> None:
    """Neither what it said when it was ahead of the database: nobody could forget that any more."""
    stores.run_job()
    stores.status.record_reports([(make.report("host-c"), T)])
    obeyed = LastObeyed("", 1, "act-deadbeef-9.stop.host-c.1")
    SqlStandings(stores.db, stores.clock).record(HostStanding("host-c", "i", 1.0, obeyed, 0.0))
    SqlOrderStore(stores.db).cordon("host-c", "for a test", T)
    SqlDrainStore(stores.db).drain("host-c", DrainRequest(reason="for a test"), T)
    SqlConditionStore(stores.db).begin("host-c", HostCondition("hot", Severity.INFO, "It is warm.", "operator", 1.0))
    assert {"hosts", "standings", "drains", "host_conditions"} <= _tables_that_name(stores, "host-c")
    SqlHostRemoval(stores.db).remove("host-c", T + 60)
    assert _tables_that_name(stores, "host-c") <= {"signals", "incidents", "audit_entries"}, "history alone"


def _tables_that_name(stores, host_id: str) -> set[str]:
    """Tables with a row about a host."""
    with stores.db.read() as connection:
        return {
            table.name
            for table in tables.metadata.sorted_tables
            for column in table.columns
            if column.name in ("host_id", "target")
            and connection.execute(select(table).where(column == host_id)).first() is not None
        }


def test_watermarks_of_incarnations_that_others_followed_go_with_their_signals(stores, make) -> None:
    stores.run_job()
    with stores.db.write() as connection:
        rows = [{"incarnation": name, "source": "host-a", "seq": 5} for name in ("old", "daemon-host-a")]
        connection.execute(insert(tables.watermarks), rows)
    stores.commit(signals=(make.signal(),))  # from incarnation inc-a
    sweep(stores, T + 60)
    with stores.db.read() as connection:
        assert set(connection.scalars(select(tables.watermarks.c.incarnation))) == {"daemon-host-a", "inc-a"}


class Jumping(ManualClock):
    """Its wall clock jumps."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


@pytest.mark.parametrize(
    ("passed_s", "ahead_s", "jobs_left"),
    [(0.0, 400 * DAY_S, 1), (400 * DAY_S, -400 * DAY_S, 1), (400 * DAY_S, 0.0, 0), (400 * DAY_S, 0.5 * DAY_S, 0)],
)
def test_nothing_is_removed_while_the_clock_is_wrong(
    stores, passed_s: float, ahead_s: float, jobs_left: int, monkeypatch
) -> None:
    clock = Jumping(T + 20.0)
    stores.run_job()
    stores.clock.now_s = T + 10
    stores.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "all ranks ended"),))
    let_it_go(stores)
    stop = threading.Event()

    def wait(_timeout_s: float) -> bool:
        is_first, clock.ahead_s = clock.ahead_s == 0.0, ahead_s or 1.0
        clock.now_s += passed_s
        return not is_first

    monkeypatch.setattr(stop, "wait", wait)
    Sweeper(stores.db, RetentionSettings(), clock, "controller#1").run(stop)
    assert count(stores, tables.jobs) == jobs_left


def test_decisions_and_incidents_about_hosts_go_a_year_after_they_were_over(stores, make) -> None:
    """Except for the newest, whose numbers would be given out again, and for what a host obeyed last."""
    rows = {
        tables.incidents: [
            {"number": n, "job": "", "state": state, "closed": state == "resolved", "decided_at": T, "opened_at": T}
            | {"document": "{}"}
            for n, state in enumerate(("resolved", "acting", "resolved", "resolved", "resolved"), 1)
        ],
        tables.incident_changes: [
            {"incident": n, "at": at, "state": "resolved", "cause": "", "message": ""}
            for n, at in ((1, T), (3, T), (4, T + YEAR_S), (5, T))
        ],
        tables.decisions: [
            {"number": n, "incident": n, "job": "", "kind": "hold", "at": T, "epoch": 1, "document": "{}"}
            for n in (1, 2, 3, 4, 5)
        ],
        tables.actions: [
            {"number": n, "incident": n, "job": "", "plan": "{}", "state": "succeeded", "ended": True, "phase": ""}
            | {"attempt": 1, "version": 1, "message": "", "started_at": T, "ended_at": T}
            for n in (1, 3)
        ],
        tables.action_changes: [{"action": 1, "at": T, "phase": "", "state": "succeeded", "message": ""}],
    }
    with stores.db.write() as connection:
        for table, of_table in rows.items():
            connection.execute(insert(table), of_table)
    sweep(stores, T + YEAR_S - 60)
    assert count(stores, tables.decisions) == count(stores, tables.incidents) == 5, "none is a year old"
    sweep(stores, T + YEAR_S + 60)
    with stores.db.read() as connection:
        assert connection.scalars(select(tables.decisions.c.number).order_by("number")).all() == [2, 5]
        assert connection.scalars(select(tables.incidents.c.number).order_by("number")).all() == [2, 4, 5]
    assert count(stores, tables.actions) == count(stores, tables.action_changes) == 0


def test_the_last_command_that_a_host_obeyed_stays_with_its_decision(stores, make) -> None:
    command = {"command_id": "act-1", "phase": "", "host_id": "host-a", "document": "{}", "created_at": T}
    command |= {"dispatched_at": T, "is_open": False, "progress": 2, "answered_at": T}
    with stores.db.write() as connection:
        for number in (1, 2, 3):
            decision = {"number": number, "incident": None, "job": "", "kind": "check_hosts", "at": T, "epoch": 1}
            connection.execute(insert(tables.decisions).values(decision | {"document": "{}"}))
            action = {"number": number, "incident": None, "job": "", "plan": "{}", "state": "succeeded", "ended": True}
            action |= {"phase": "", "attempt": 1, "version": 1, "message": "", "started_at": T, "ended_at": T}
            connection.execute(insert(tables.actions).values(action))
        for action_number in (1, 2):
            one = command | {"command_id": f"act-{action_number}", "action": action_number}
            connection.execute(insert(tables.commands).values(one))
    sweep(stores, T + YEAR_S + 60)
    with stores.db.read() as connection:
        assert connection.scalars(select(tables.decisions.c.number).order_by("number")).all() == [2, 3]


def test_an_account_of_goodput_goes_with_its_job_and_never_back(stores, make) -> None:
    accounts = SqlGoodputAccounts(stores.db)
    accounts.save("job", 1, 10, b"ten")
    accounts.save("job", 1, 5, b"five")
    assert (accounts.load("job", 1), accounts.load("job", 2), accounts.load("other", 1)) == (b"ten", None, None)
    accounts.save("job", 2, 5, b"of another release")
    accounts.save_ratio("job", 0.25)
    assert (accounts.load("job", 1), accounts.load("job", 2)) == (None, b"of another release")
    assert accounts.ratios() == {"job": 0.25}
    stores.run_job()
    stores.clock.now_s = T + 10
    stores.commit(jobs=(JobChange("job", JobState.SUCCEEDED, "all ranks ended"),))
    let_it_go(stores)
    sweep(stores, T + YEAR_S + 60)
    assert count(stores, tables.jobs) == 0
    assert accounts.load("job", 2) is None and accounts.ratios() == {}


def test_the_history_of_a_job_begins_with_its_first_event(stores) -> None:
    kinds = (EventKind.CONTROLLER_ELECTED,)
    log = [Event(T, kind, job) for job in ("", "job", "other", "") for kind in (*kinds, EventKind.HOST_JOINED)]
    assert stores.log.history("job", 0, 10, kinds) == []
    stores.log.append(log)
    assert [number for number, _ in stores.log.history("job", 0, 10, kinds)] == [3, 4, 7]
    assert [number for number, _ in stores.log.history("job", 3, 1, kinds)] == [4]
    assert [number for number, _ in stores.log.history("job", 4, 9, kinds)] == [7]
