"""The actuator's side of the store: compare-and-set, fences, and answers that arrive twice, late or out of order."""

from __future__ import annotations

import itertools
import threading

import pytest

from flyball.contracts.checkpoints import RestorePlan
from flyball.contracts.decisions import ActionState, CommandResult, RankPosition, StartWorkers, UpdateState
from flyball.contracts.events import EventKind
from flyball.contracts.identity import Fence
from services.actuator.ports import CommandDraft, PlaybookStep

DEADLINE_S = 120.0


@pytest.fixture
def stores(port_stores):
    return port_stores


def open_ids(stores, host_id: str = "host-a") -> list[str]:
    return [command.command_id for command in stores.actions.commands_for(host_id, 1000.0)]


def test_an_open_action_is_read_with_everything_that_happened_to_it(stores, make) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    update = make.update("act-2.stop.host-a.1", result=CommandResult(free_port=29501))
    stores.actions.record(update)
    (progress,) = stores.actions.open_actions()
    assert (progress.action_id, progress.decision_id, progress.incident_id) == ("act-2", "dec-2", "inc-1")
    assert (progress.phase, progress.state, progress.plan) == ("stop", ActionState.DISPATCHED, restart.action)
    assert [(r.command.command_id, r.phase, r.state) for r in progress.commands] == [
        ("act-2.stop.host-a.1", "stop", UpdateState.SUCCEEDED),
        ("act-2.stop.host-b.1", "stop", None),
    ]
    assert progress.commands[0].update == update
    stores.actions.record(make.update("act-2.stop.host-b.1"))
    (progress,) = stores.actions.open_actions()  # its next step starts a generation
    assert progress.engine_addresses == {"host-a": "host-a:7000", "host-b": "host-b:7000"}


def test_a_step_is_applied_once_whoever_is_first(stores, clock) -> None:
    stores.run_job()
    stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    again = PlaybookStep("stop", ActionState.DISPATCHED, message="asking again")
    assert stores.actions.apply(progress, again, 1001.0)
    assert not stores.other_actions().apply(progress, again, 1001.0)
    (moved,) = stores.actions.open_actions()
    assert moved.version == progress.version + 1


def test_of_two_executors_at_once_one_starts_the_generation(stores, make, clock) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    begin = threading.Barrier(4)
    applied: list[bool] = []

    def execute() -> None:
        store = stores.other_actions()
        begin.wait(DEADLINE_S)
        applied.append(store.apply(progress, make.start_step(restart, 7), 1001.0))

    threads = [threading.Thread(target=execute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(applied) == [False, False, False, True]
    assert open_ids(stores) == ["act-2.stop.host-a.1", "act-2.start.host-a.1"]
    assert stores.kinds().count(EventKind.GENERATION_STARTED) == 2  # the job's first, and this one


def test_a_start_stores_its_placement_and_writes_an_event(stores, make) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart, 7), 1001.0)
    (stopped, started) = [event for _, event in stores.log.read("job", 0, 100)][-2:]
    assert (stopped.kind, stopped.generation, stopped.at) == (EventKind.WORKERS_STOPPED, 1, 1001.0)
    assert (started.kind, started.generation) == (EventKind.GENERATION_STARTED, 2)
    assert started.data == {"restore_step": 7, "world_size": 4}
    command = stores.actions.commands_for("host-b", 1001.0)[-1]
    assert isinstance(command.body, StartWorkers)
    assert command.body.placement.restore == RestorePlan(7, {})


def test_fences_let_the_stop_before_the_start_and_refuse_it_after(stores, make) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart), 1001.0)
    stop, start = stores.actions.commands_for("host-a", 1001.0)
    assert (stop.fence, start.fence) == (Fence(stores.epoch, 1), Fence(stores.epoch, 2))


def test_a_decision_that_supersedes_a_started_generation_can_stop_it(stores, make) -> None:
    """A host that has started generation 2 must not refuse the stop before generation 3, whatever it says it stops."""
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart), 1001.0)
    started = stores.actions.commands_for("host-a", 1001.0)[-1].fence
    better = make.restart(3, generation=1, next=make.grant(3))
    stores.commit(decisions=(better,), superseded_actions=("act-2",), steps={"act-3": make.stop_step(better)})
    (stop,) = stores.actions.commands_for("host-a", 1002.0)
    assert stop.fence >= started
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(better), 1003.0)
    assert stores.actions.commands_for("host-a", 1003.0)[-1].fence > stop.fence


def test_commands_written_under_a_new_leader_carry_its_epoch(stores, make, clock) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    successor = stores.other_decisions().acquire_lease("controller#2", 1000.0)
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, make.start_step(restart), 1001.0)
    assert stores.actions.commands_for("host-a", 1001.0)[-1].fence == Fence(successor.epoch, 2)


def test_a_command_is_handed_out_until_it_is_finally_answered(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    assert open_ids(stores) == open_ids(stores) == ["act-2.stop.host-a.1"]
    assert open_ids(stores, "host-c") == []
    stores.actions.record(make.update("act-2.stop.host-a.1", "acknowledged"))
    assert open_ids(stores) == ["act-2.stop.host-a.1"]
    stores.actions.record(make.update("act-2.stop.host-a.1", "failed"))
    assert open_ids(stores) == []
    assert open_ids(stores, "host-b") == ["act-2.stop.host-b.1"]


def test_a_new_command_to_a_host_replaces_its_earlier_one(stores, make) -> None:
    stores.run_job()
    restart = stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    body = progress.commands[0].command.body
    again = CommandDraft("act-2.stop.host-a.2", "host-a", body, 5.0)
    assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.DISPATCHED, (again,)), 1001.0)
    assert open_ids(stores) == ["act-2.stop.host-a.2"]
    assert open_ids(stores, "host-b") == ["act-2.stop.host-b.1"]
    stores.actions.record(make.update("act-2.stop.host-a.1"))  # late, but still true
    (progress,) = stores.actions.open_actions()
    assert {r.command.command_id: r.state for r in progress.commands}["act-2.stop.host-a.1"] is UpdateState.SUCCEEDED
    assert restart.action is not None


def test_an_action_that_ended_takes_its_commands_along(stores) -> None:
    stores.run_job()
    stores.begin_restart()
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.TIMED_OUT), 1001.0)
    assert open_ids(stores) == []
    assert stores.actions.open_actions() == []
    assert stores.kinds()[-1] is EventKind.ACTION_ENDED


def test_an_answer_to_an_unknown_command_or_from_another_host_is_ignored(stores, make) -> None:
    stores.run_job()
    stores.begin_restart()
    before = stores.actions.open_actions()
    stores.actions.record(make.update("act-9.stop.host-a.1"))
    stores.actions.record(make.update("act-2.stop.host-a.1", host_id="host-b"))
    assert stores.actions.open_actions() == before


@pytest.mark.parametrize("final", ["succeeded", "failed", "refused"])
def test_no_order_of_answers_moves_a_command_backwards(stores, make, final: str) -> None:
    """All orders of an acknowledgement, a final answer, its repetition, and another late final answer."""
    stores.run_job()
    stores.begin_restart()
    other = "failed" if final == "succeeded" else "succeeded"
    for number, order in enumerate(itertools.permutations(["acknowledged", final, final, other])):
        (progress,) = stores.actions.open_actions()
        body = progress.commands[0].command.body
        command_id = f"act-2.stop.host-a.{number + 2}"
        draft = CommandDraft(command_id, "host-a", body, 5.0)
        assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.DISPATCHED, (draft,)), 1001.0)
        seen = []
        for state in order:
            result = CommandResult(positions=(RankPosition(0, 7),) if state == final else ())
            stores.actions.record(make.update(command_id, state, result=result))
            (progress,) = stores.actions.open_actions()
            record = next(r for r in progress.commands if r.command.command_id == command_id)
            seen.append(record.state)
        first_final = next(state for state in order if state != "acknowledged")
        assert seen[-1] == first_final
        moment = seen.index(UpdateState(first_final))
        assert set(seen[moment:]) == {UpdateState(first_final)}
        assert command_id not in open_ids(stores)
