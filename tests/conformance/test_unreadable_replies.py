"""A row that cannot be decoded, whoever wrote it, breaks no reply of the API and no page: it is left out, or the reply
says that it cannot be read."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from support.servers.api_here import ApiHere
from support.servers.whole_replies import problems
from support.stores.poisoned import POISONED, broken_text, decoded_columns, fill, poison

from flyball.contracts.errors import NotFound
from services.runtime.list_filters import AuditFilter
from services.runtime.paging import Page
from services.store.actions.departures import SqlDepartures
from services.store.decisions.audit_store import SqlAuditLog
from services.store.read.read_models import SqlReadModels
from services.store.sql import tables

# What an operator may ask for: the method, the path, and a body. Tokens, events and log pieces read no row.
ACTS: tuple[tuple[str, str, object], ...] = (
    ("POST", "/v1/hosts/host-a/drain", {"reason": "x"}),
    ("POST", "/v1/hosts/host-b/undrain", None),
    ("POST", "/v1/hosts/host-a/conditions", {"kind": "hot", "severity": "info", "message": "It is warm."}),
    ("DELETE", "/v1/hosts/host-a/conditions?kind=hot&reporter=operator", None),
    ("POST", "/v1/hosts/host-a/cordon", {"reason": "x"}),
    ("POST", "/v1/hosts/host-a/uncordon", None),
    ("POST", "/v1/hosts/host-a/uncordon?skip_check=true", None),
    ("POST", "/v1/checks", {"hosts": ["host-a", "host-b"]}),
    ("POST", "/v1/silence", {"for_s": 60.0, "host_id": "host-a"}),
    ("POST", "/v1/approve", {"target": "inc-1"}),
    ("POST", "/v1/approve", {"target": "dec-2"}),
    ("POST", "/v1/jobs/job/checkpoint", {}),
    ("POST", "/v1/jobs/job/adopt", {}),
    ("POST", "/v1/jobs", {"job": "job", "argv": ["x.py"], "workdir": "/"}),
    ("POST", "/v1/jobs", {"job": "new", "argv": ["x.py"], "workdir": "/"}),
    ("POST", "/v1/jobs/job/stop", None),
    ("DELETE", "/v1/hosts/host-b", None),
)


@pytest.fixture
def full(stores):  # type: ignore[no-untyped-def]
    fill(stores)
    return stores


def test_each_route_answers(full, tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert problems(ApiHere(full, tmp_path)) == {}


@pytest.mark.parametrize(("table", "column", "value"), POISONED)
def test_a_poisoned_row_breaks_no_reply(full, tmp_path, table, column, value) -> None:  # type: ignore[no-untyped-def]
    poison(full, table, column, value)
    assert problems(ApiHere(full, tmp_path), table) == {}


def test_each_act_is_carried_out(full, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """But what waits for nobody, another job of the same name, and the removal of a host with ranks."""
    replies = zip(ACTS, ApiHere(full, tmp_path).ask(ACTS), strict=True)
    refused = [(path, body) for (_, path, body), reply in replies if not reply.is_success]
    assert refused == [
        ("/v1/approve", {"target": "inc-1"}),
        ("/v1/approve", {"target": "dec-2"}),
        ("/v1/jobs/job/adopt", {}),
        ("/v1/jobs", {"job": "job", "argv": ["x.py"], "workdir": "/"}),
        ("/v1/hosts/host-b", None),
    ]


@pytest.mark.parametrize(("table", "column", "value"), POISONED)
def test_a_poisoned_row_breaks_no_act(full, tmp_path, table, column, value) -> None:  # type: ignore[no-untyped-def]
    """It is carried out, rehearsed or refused with a reason that a person can use."""
    poison(full, table, column, value)
    api = ApiHere(full, tmp_path)
    rehearsed = [(method, f"{path}{'&' if '?' in path else '?'}dry_run=true", body) for method, path, body in ACTS]
    for reply in (*api.ask(rehearsed), *api.ask(ACTS)):
        assert reply.status_code < 500, (reply.request.method, reply.request.url, reply.text)
        assert reply.is_success or reply.json()["detail"], reply.text


def test_rows_that_cannot_be_read_are_no_gap_in_a_list(stores, make) -> None:  # type: ignore[no-untyped-def]
    """A page that is shorter than its limit is the last one: behind it nobody looks."""
    for number in range(6):
        stores.jobs.submit(make.spec(job=f"job-{number}"), make.T + number)
        stores.status.record_reports([(make.report(f"host-{number}"), make.T)])
    with stores.db.write() as connection:
        for table, column, names in (
            (tables.jobs, "spec", ("job-3", "job-4")),
            (tables.hosts, "engine", ("host-3", "host-4")),
        ):
            key = next(iter(table.primary_key.columns))
            connection.execute(update(table).where(key.in_(names)).values({column: "nonsense"}))
    reads = SqlReadModels(stores.db)
    assert [job["job"] for job in reads.jobs(Page(3))] == ["job-1", "job-2", "job-5"]
    assert [job["job"] for job in reads.jobs(Page(3, "job-1"))] == ["job-0"]
    assert [host["host_id"] for host in reads.hosts(Page(3))] == ["host-1", "host-2", "host-5"]
    with pytest.raises(NotFound, match="The job 'job-3' cannot be read: job-3 of jobs"):
        reads.job("job-3")
    with pytest.raises(NotFound, match="There is no job 'job-9'"):
        reads.job("job-9")
    poison(stores, "jobs", "state", "dancing")
    with pytest.raises(NotFound, match="There is no host 'host-9'"):
        reads.host("host-9")


def test_a_record_of_the_audit_is_shown_as_far_as_it_can_be_read(full) -> None:  # type: ignore[no-untyped-def]
    poison(full, "audit_entries", "detail", "[]")
    entries = SqlAuditLog(full.db, full.clock).entries(Page(100), AuditFilter())
    assert entries and {entry["detail"].get("unreadable") for entry in entries} == {True}


def test_a_daemon_gets_answers_all_the_same(full) -> None:  # type: ignore[no-untyped-def]
    """Commands and departures go to it alone. `host-c` has no ranks, and a notice."""
    full.status.record_reports([(full.make.report("host-c"), full.make.T)])
    mine = tables.hosts.c.host_id == "host-c"
    with full.db.write() as connection:
        connection.execute(update(tables.hosts).where(mine).values(preempt_deadline_at=full.make.T + 60.0))
    for table, columns in decoded_columns().items():
        for column in columns:
            with broken_text(full, table, column):
                SqlDepartures(full.db).departure("host-c")
                full.other_actions().commands_for("host-a", full.clock.wall_s())
