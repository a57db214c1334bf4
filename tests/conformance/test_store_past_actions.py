"""What a view tells of a job's past: read once for each of its incidents and actions, whatever other jobs do."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import Connection, insert

from flyball.contracts.decisions import DecisionKind
from services.store.decisions.past_actions import WINDOW_S, PastActions
from services.store.sql.tables import actions, decisions

OLD, NEW = 3000, 6  # actions before the window, and in it


def test_the_past_of_a_job_is_read_again_only_when_its_own_incidents_or_actions_change(
    stores, make, statements: list[str]
) -> None:
    stores.run_job()
    stores.place("other", 1, "host-c")
    stores.begin_restart()

    def reads() -> int:
        """How many jobs' pasts a view reads. It shows what a fresh reader finds."""
        statements.clear()
        view = stores.decisions.load_view()
        count = sum("actions.started_at >" in statement for statement in statements)
        fresh = stores.other_decisions().load_view()
        assert [(job.recoveries, job.acted_at) for job in view.jobs] == [
            (job.recoveries, job.acted_at) for job in fresh.jobs
        ]
        return count

    assert (reads(), reads()) == (1, 0)
    elsewhere = msgspec.structs.replace(make.incident(2, "deciding", host_id="host-c"), job="other")
    stores.commit(incidents=(elsewhere,))
    assert (reads(), reads()) == (1, 0), "of the other job alone"
    stores.commit(incidents=(msgspec.structs.replace(elsewhere, message="It is another one."),))
    assert reads() == 0
    stores.commit(incidents=(make.incident(3, "deciding"),))
    assert (reads(), reads()) == (1, 0)
    closed = msgspec.structs.replace(elsewhere, state=type(elsewhere.state)("resolved"))
    stores.commit(incidents=(closed,))
    assert (reads(), reads()) == (1, 0), "the next incident must find what was done about this one"


def test_an_open_incident_is_decoded_once_until_it_changes(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    (first,), (again,) = (stores.decisions.load_view().incidents for _ in range(2))
    assert again is first
    stores.commit(incidents=(msgspec.structs.replace(first, message="It is another one."),))
    assert stores.decisions.load_view().incidents[0].message == "It is another one."


@pytest.mark.parametrize("jobs", [1, 3])
def test_of_years_of_actions_only_those_of_the_last_hour_are_read(stores, clock, jobs: int) -> None:
    """A controller that begins reads the past of all jobs at once."""
    names = [f"job-{n}" for n in range(jobs)]
    rows = []
    for number in range(1, OLD + NEW + 1):
        is_old = number <= OLD
        started_at = clock.wall_s() - (WINDOW_S + OLD - number if is_old else OLD + NEW - number)
        rows.append(({"number": number, "incident": 1, "job": names[number % jobs]}, started_at))
    with stores.db.write() as connection:
        decided = {"kind": "restart_in_place", "epoch": 1, "document": "{}"}
        connection.execute(insert(decisions), [row | decided | {"at": at} for row, at in rows])
        done = {"plan": "{}", "state": "succeeded", "ended": True, "phase": "start", "attempt": 1, "version": 1}
        done |= {"message": "", "ended_at": 0.0}
        connection.execute(insert(actions), [row | done | {"started_at": at} for row, at in rows])
    with stores.db.read() as connection:
        before = rows_read(connection, is_sqlite=stores.db.is_sqlite)
        past = PastActions(clock).read(connection, (), {}, shown=names, present=names, restarted=names)
        after = rows_read(connection, is_sqlite=stores.db.is_sqlite)
    assert [len(past[name].acted_at) for name in names] == [NEW // jobs] * jobs
    assert after - before < OLD / 2, "and the question how many reads some, too"


def rows_read(connection: Connection, *, is_sqlite: bool) -> int:
    """By this connection so far. SQLite does not count them."""
    if is_sqlite:
        return 0
    found = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
    return sum(
        int(count) for name, count in found if name != "Handler_read_rnd_next"
    )  # the status itself is such a read


@pytest.mark.parametrize(("kind", "counts"), [(DecisionKind.RESTART_IN_PLACE, True), (DecisionKind.CORDON, False)])
def test_the_end_of_strays_is_no_action_about_the_job(stores, make, kind: DecisionKind, counts: bool) -> None:
    """A host that claims to have them without end would use up the actions that the job may have in an hour."""
    stores.run_job()
    decision = msgspec.structs.replace(make.restart(), kind=kind)
    incident = make.incident(action_id="act-2")
    stores.commit(incidents=(incident,), decisions=(decision,), steps={"act-2": make.stop_step(decision)})
    (job,) = stores.other_decisions().load_view().jobs
    assert bool(job.acted_at) is counts
