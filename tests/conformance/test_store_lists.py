"""Lists for users: every filter, alone and with a page; and an incident as a story."""

from __future__ import annotations

import json

import pytest

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.errors import NotFound
from flyball.contracts.events import Event, EventKind
from flyball.contracts.orders import OrderKind, OrderState, SilenceRequest
from services.runtime.list_filters import (
    ActionFilter,
    DecisionFilter,
    HostFilter,
    IncidentFilter,
    JobFilter,
    OrderFilter,
    SignalFilter,
)
from services.runtime.paging import Page
from services.store.decisions.order_store import SqlOrderStore
from services.store.read.read_models import SqlReadModels
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog, newest_of_jobs

ALL = Page()


@pytest.fixture
def reads(stores) -> SqlReadModels:
    return SqlReadModels(stores.db)


@pytest.fixture
def restarted(stores, make):
    """A worker was killed; its job restarts."""
    stores.run_job()
    stores.begin_restart()
    return stores


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (IncidentFilter(), ["inc-1", "inc-2", "inc-3"]),
        (IncidentFilter(states=(IncidentState.RESOLVED,)), ["inc-2"]),
        (IncidentFilter(states=(IncidentState.RESOLVED, IncidentState.OPEN)), ["inc-2", "inc-3"]),
        (IncidentFilter(host_id="host-b"), ["inc-3"]),
        (IncidentFilter(cause="host_silent"), ["inc-3"]),
        (IncidentFilter(host_id="host-b", cause="worker_killed"), []),
        (IncidentFilter(since=2000.0), ["inc-2", "inc-3"]),
        (IncidentFilter(since=2000.5), ["inc-3"]),
        (IncidentFilter(since=9999.0), []),
    ],
)
def test_incidents(restarted, reads, make, wanted, found) -> None:
    late = make.incident(incident_id="inc-2", state="resolved", since=2001.0, opened_at=2000.0, host_id="")
    last = make.incident(incident_id="inc-3", state="open", opened_at=3000.0, host_id="host-b", cause="host_silent")
    restarted.commit(incidents=(late, last))
    assert [one["incident_id"] for one in reads.incidents(None, ALL, wanted)] == found
    assert [one["incident_id"] for one in reads.incidents(None, Page(limit=1), wanted)] == found[-1:]
    assert reads.incidents("none", ALL, wanted) == []


def test_jobs_and_hosts(restarted, reads, make) -> None:
    (job,) = reads.jobs(wanted=JobFilter(states=(JobState.RUNNING,)))
    assert reads.jobs(wanted=JobFilter(states=(JobState.FAILED, JobState.STOPPED))) == []
    assert [one["job"] for one in reads.jobs(wanted=JobFilter(since=job["submitted_at"]))] == ["job"]
    assert reads.jobs(wanted=JobFilter(since=job["submitted_at"] + 0.5)) == []

    hosts = {one["host_id"]: one for one in reads.hosts()}

    def names(**wanted) -> list[str]:  # type: ignore[no-untyped-def]
        return [one["host_id"] for one in reads.hosts(wanted=HostFilter(**wanted))]

    for state in HostState:
        assert names(states=(state,)) == [name for name, one in hosts.items() if one["state"] == state.value]
    assert names(job="job") == [name for name, one in hosts.items() if one["job"] == "job"] != []
    assert names(job="none") == []
    assert names(host_ids=("host-b", "host-z")) == ["host-b"]
    assert (reads.job_counts(), len(reads.jobs())) == ({"open": 1, "ended": 0}, 1)
    domain = hosts["host-a"]["failure_domain"]
    assert names(failure_domain=domain) == [n for n, one in hosts.items() if one["failure_domain"] == domain]


def test_decisions_and_actions(restarted, reads) -> None:
    start, restart = reads.decisions(None)
    assert [one["kind"] for one in (start, restart)] == ["start_job", "restart_in_place"]

    def ids(**wanted) -> list[str]:  # type: ignore[no-untyped-def]
        return [one["decision_id"] for one in reads.decisions(None, ALL, DecisionFilter(**wanted))]

    assert ids(kinds=(DecisionKind.RESTART_IN_PLACE,)) == [restart["decision_id"]]
    assert ids(incident_id="inc-1") == [restart["decision_id"]]
    assert ids(incident_id="inc-9") == []
    assert ids(since=restart["at"]) == [one["decision_id"] for one in (start, restart) if one["at"] >= restart["at"]]

    found = reads.actions(ALL, ActionFilter())
    assert [(one["action_id"], one["kind"], one["incident_id"]) for one in found] == [
        ("act-1", "start_job", ""),
        ("act-2", "restart_in_place", "inc-1"),
    ]
    assert reads.actions(ALL, ActionFilter(states=(ActionState.FAILED,))) == []
    assert reads.actions(ALL, ActionFilter(job="job", incident_id="inc-1")) == found[1:]
    assert reads.actions(ALL, ActionFilter(job="none")) == []
    assert reads.actions(Page(before="act-2"), ActionFilter()) == found[:1]
    whole = reads.action("act-2")
    assert json.loads(json.dumps(whole)) == whole
    assert whole["commands"] and whole["plan"]["kind"] == "restart_in_place"
    with pytest.raises(NotFound, match="act-9"):
        reads.action("act-9")


def test_signals(restarted, reads, make) -> None:
    restarted.commit(signals=(make.signal(50, make.exited(1)), make.signal(51, make.exited(2))))
    found = reads.signals(ALL, SignalFilter())
    assert len(found) >= 2
    assert [one["kind"] for one in found[-2:]] == ["worker_exited"] * 2
    assert reads.signals(Page(limit=1), SignalFilter(job="job", kind="worker_exited")) == found[-1:]
    assert reads.signals(Page(limit=1, before=found[-1]["signal_id"]), SignalFilter()) == found[-2:-1]
    assert reads.signals(ALL, SignalFilter(host_id="host-z")) == []
    assert reads.signals(ALL, SignalFilter(kind="host_silent")) == []
    newest = found[-1]["stored_at"]
    assert reads.signals(ALL, SignalFilter(since=newest)) == [one for one in found if one["stored_at"] >= newest]
    assert reads.signals(ALL, SignalFilter(since=newest + 1.0)) == []


def test_orders_come_in_pages(restarted, reads) -> None:
    orders = SqlOrderStore(restarted.db)
    for host in ("host-a", "host-b"):
        orders.cordon(host, "broken", 1000.0)
        orders.silence(SilenceRequest(60.0, host), 1000.0)
    every = [("cordon", "host-a"), ("cordon", "host-b"), ("silence", "host-a"), ("silence", "host-b")]

    def keys(page: Page, **wanted) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
        return [(one["kind"], one["target"]) for one in reads.orders(page, OrderFilter(**wanted))]

    assert keys(ALL) == every
    assert keys(Page(limit=3)) == every[1:]
    assert keys(Page(limit=3, before="cordon:host-b")) == every[:1]
    assert keys(ALL, kinds=(OrderKind.SILENCE,)) == every[2:]
    assert keys(ALL, states=(OrderState.REFUSED,)) == []
    assert keys(ALL, targets=("host-b", "domain:rack-1")) == every[1::2]


def test_events_since_a_moment(db) -> None:
    log = SqlEventLog(db)
    events = [Event(float(at), EventKind.FAULT_INJECTED) for at in (*range(1000, 2000, 10), 1985)]
    log.append(events)
    late = [(number, event) for number, event in log.read(None, 0, 1000) if event.at >= 1960.0]
    assert log.read(None, 0, 1000, (), 1960.0) == late
    assert log.newest(None, 2, (), 1960.0) == late[-2:]
    assert log.read(None, 0, 1000, (), 5000.0) == []


@pytest.mark.parametrize("job", [None, "one", "none"])
@pytest.mark.parametrize(
    "kinds",
    [
        (),
        (EventKind.STEPS,),
        (EventKind.FAULT_INJECTED,),
        (EventKind.HOST_JOINED,),
        (EventKind.STEPS, EventKind.RANK_MARKS),
    ],
)
def test_events_of_a_job_or_of_some_kinds_are_found_by_an_index(stores, statements, job, kinds) -> None:
    log = SqlEventLog(stores.db)
    kind_of = (EventKind.STEPS, EventKind.RANK_MARKS, EventKind.FAULT_INJECTED)
    log.append([Event(float(n), kind_of[n % 3], ("one", "two", "", "")[n % 4]) for n in range(24)])
    whole = log.read(None, 0, 1000)
    of = [
        (number, event)
        for number, event in whole
        if (job is None or event.job in (job, "")) and (not kinds or event.kind in kinds)
    ]
    statements.clear()
    assert log.read(job, 5, 3, kinds) == [one for one in of if one[0] > 5][:3]
    assert log.newest(job, 3, kinds) == of[-3:]
    if stores.db.is_sqlite:
        steps = [step for step in plan_of(stores.db, statements) if "events" in step]
        of_number = "(rowid" if job is None and not kinds else "(rowid=?)"  # the whole log in order, or one event of it
        assert steps and all("INDEX ix_events_" in step or of_number in step for step in steps), steps


def test_the_newest_events_of_several_jobs_take_one_statement(stores, statements) -> None:
    SqlEventLog(stores.db).append(
        [
            Event(float(n), (EventKind.STEPS, EventKind.RANK_MARKS)[n % 2], ("one", "two", "three")[n % 3])
            for n in range(36)
        ]
    )
    statements.clear()
    with stores.db.read() as connection:
        found = newest_of_jobs(connection, ["one", "two", "none"], EventKind.STEPS, 2)
    assert sorted((event.job, event.at) for event in found) == [
        ("one", 24.0),
        ("one", 30.0),
        ("two", 28.0),
        ("two", 34.0),
    ]
    assert len([statement for statement in statements if "FROM events" in statement]) == 1


def plan_of(db: Database, statements: list[str]) -> list[str]:
    """How SQLite carries these statements out."""
    with db.read() as connection:
        return [
            row[3]
            for statement in list(statements)
            if statement.startswith("SELECT")
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", (1,) * statement.count("?"))
        ]


def test_a_look_at_all_hosts_reads_no_rows(restarted, reads, statements) -> None:
    reads.host_map()
    reads.recoverability("job")
    if restarted.db.is_sqlite:
        of_hosts = [step for step in plan_of(restarted.db, statements) if " hosts " in step and "host_id=?" not in step]
        assert len(of_hosts) >= 4 and all("COVERING INDEX" in step for step in of_hosts), of_hosts


def test_the_hosts_of_a_job_come_in_pages(restarted, reads) -> None:
    def page(before: str, limit: int = 1) -> list[str]:
        return [one["host_id"] for one in reads.hosts(Page(limit, before), wanted=HostFilter(job="job"))]

    assert [page(""), page("host-b"), page("host-a"), page("", 5)] == [
        ["host-b"],
        ["host-a"],
        [],
        ["host-a", "host-b"],
    ]
    silent = HostFilter(job="job", states=(HostState.SILENT,))
    assert reads.hosts(Page(1), wanted=silent) == []


def test_an_incident_is_a_story(restarted, reads, make) -> None:
    found = reads.incident("inc-1")
    assert json.loads(json.dumps(found)) == found
    assert [one["decision_id"] for one in found["decided"]] == found["decision_ids"] == ["dec-2"]
    assert found["decided"][0]["action"]["commands"]
    assert found["observed"] == reads.decision("dec-2")["signals"]
    story = found["story"]
    assert [line["at"] for line in story] == sorted(line["at"] for line in story)
    assert {"state", "decision", "action"} <= {line["part"] for line in story}
    (decision,) = [line for line in story if line["part"] == "decision"]
    assert (decision["what"], decision["about"]) == ("restart_in_place", "dec-2")
    assert decision["detail"] == found["decided"][0]["reason"]
    with pytest.raises(NotFound, match="inc-9"):
        reads.incident("inc-9")
