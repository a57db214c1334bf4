"""An outbox shared by several actuators: who advances an action, and which hosts have new commands."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import event, select

from flyball.contracts.decisions import ActionPlan, ActionState, Decision, DecisionKind, StopWorkers
from services.actuator.ports import CommandDraft, PlaybookStep
from services.store.sql.tables import actions

DEADLINE_S = 120.0


def test_which_hosts_have_unanswered_commands_and_when_they_changed(stores, make) -> None:
    stores.run_job()
    assert stores.actions.unanswered() == {}
    stores.begin_restart()
    before = stores.actions.unanswered()
    assert sorted(before) == ["host-a", "host-b"]
    assert stores.actions.unanswered() == before
    asked = stores.actions.commands_for_hosts(["host-a", "host-b", "host-c"], 1001.0)
    assert {host: [c.command_id for c in given] for host, given in asked.items()} == {
        "host-a": ["act-2.stop.host-a.1"],
        "host-b": ["act-2.stop.host-b.1"],
    }
    (progress,) = stores.actions.open_actions()
    more = CommandDraft("act-2.more.host-a.1", "host-a", progress.commands[0].command.body, 5.0)
    assert stores.actions.apply(progress, PlaybookStep("more", ActionState.DISPATCHED, (more,)), 1001.0)
    after = stores.actions.unanswered()
    assert after["host-a"] != before["host-a"]
    assert after["host-b"] == before["host-b"]
    stores.actions.record(make.update("act-2.stop.host-b.1"))
    assert sorted(stores.actions.unanswered()) == ["host-a"]


def test_executors_that_share_the_outbox_advance_every_action_once(stores, make) -> None:
    """Three executors, each of which sees every action, advance each through the same phases."""
    jobs, phases = 6, 5
    for number in range(1, jobs + 1):
        plan = ActionPlan(DecisionKind.STOP_JOB, f"job-{number}", make.spec(job=f"job-{number}"), 1)
        stores.commit(decisions=(Decision(f"dec-{number}", "", plan.job, plan.kind, "why", "rule", 1000.0, {}, plan),))
    begin = threading.Barrier(3)
    moved: list[tuple[str, int]] = []
    finished: list[bool] = []

    def execute() -> None:
        store = stores.other_actions()
        begin.wait(DEADLINE_S)
        while found := store.open_actions():
            for progress in found:
                body = StopWorkers(progress.plan.job, 1, 0.0)
                draft = CommandDraft(f"{progress.action_id}.stop.host-a.{progress.version}", "host-a", body, 5.0)
                is_last = progress.version == phases - 1
                step = PlaybookStep("stop", ActionState.SUCCEEDED if is_last else ActionState.DISPATCHED, (draft,))
                if store.apply(progress, step, 1001.0):
                    moved.append((progress.action_id, progress.version))
        finished.append(True)

    threads = [threading.Thread(target=execute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert finished == [True] * 3
    assert sorted(moved) == [(f"act-{n}", version) for n in range(1, jobs + 1) for version in range(phases)]


def test_an_action_that_another_executor_advances_is_skipped_without_waiting(stores, make) -> None:
    if stores.db.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    with stores.db.write() as mover:
        mover.execute(select(actions).where(actions.c.number == 2).with_for_update()).all()
        assert not stores.actions.apply(progress, make.start_step(restart), 1001.0)  # not after a lock timeout
    assert stores.actions.apply(progress, make.start_step(restart), 1001.0)


def test_what_is_open_is_found_by_an_index(stores) -> None:
    """MySQL uses no index for IS TRUE, and nearly all commands of a year are answered."""
    seen: list[tuple[str, object]] = []

    def note(_connection, _cursor, statement: str, parameters: object, *_: object) -> None:
        if statement.startswith("SELECT"):
            seen.append((statement, parameters))

    engine = stores.db._reader
    event.listen(engine, "before_cursor_execute", note)
    stores.actions.unanswered()
    stores.actions.commands_for_hosts(["host-a", "host-b"], 1001.0)
    stores.actions.open_actions()
    event.remove(engine, "before_cursor_execute", note)
    explain = "EXPLAIN QUERY PLAN" if stores.db.is_sqlite else "EXPLAIN"
    with stores.db.read() as connection:
        plans = [str(connection.exec_driver_sql(f"{explain} {one}", given).all()) for one, given in seen]
    assert len(plans) == 3
    assert all("ix_commands_is_open_host_id" in plan for plan in plans[:2]), plans
    assert "ix_actions_ended" in plans[2], plans
