"""The executor, over actions in memory: one that cannot be moved does not stop the others, and has an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from support.clocks.manual import ManualClock

from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import ActionPlan, ActionState, Command, CommandUpdate, DecisionKind, GenerationPlan
from flyball.contracts.errors import Unreachable
from flyball.contracts.identity import Fence
from services.actuator.executor import AWAY_AFTER_S, MAX_FAULTS, Executor
from services.actuator.ports import ActionProgress, OutboxCommand, PlaybookStep
from services.runtime.wakeup import LocalWakeup


class Actions:
    """An action store in memory. `fault` is called with every move before it is stored."""

    def __init__(self, *found: ActionProgress) -> None:
        self.all = {progress.action_id: progress for progress in found}
        self.fault: Callable[[str, PlaybookStep], None] = lambda _action_id, _step: None

    def open_actions(self) -> list[ActionProgress]:
        return [progress for progress in self.all.values() if not progress.state.ended]

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        self.fault(progress.action_id, step)
        fresh = [
            OutboxCommand(
                Command(d.command_id, progress.action_id, d.host_id, Fence(1, 1), d.body, d.deadline_s),
                step.phase,
                now,
                None,
            )
            for d in step.commands
        ]
        self.all[progress.action_id] = msgspec.structs.replace(
            progress, phase=step.phase, state=step.state, commands=(*progress.commands, *fresh)
        )
        return True

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        raise AssertionError("for the host daemons only")

    def record(self, update: CommandUpdate) -> None:
        raise AssertionError("for the host daemons only")


def action(number: int, started_at: float = 1000.0, *, hosts: tuple[HostRanks, ...] | None = None) -> ActionProgress:
    job = f"job-{number}"
    placed = (HostRanks("a", "10.0.0.1", "a:7", (0,)),) if hosts is None else hosts
    return ActionProgress(
        action_id=f"act-{number}",
        decision_id=f"dec-{number}",
        incident_id="",
        plan=ActionPlan(
            DecisionKind.START_JOB,
            job,
            JobSpec(job=job, argv=("t.py",), workdir="/"),
            generation=0,
            next=GenerationPlan(job, 1, None, placed, {}, (), restart_count=0),
            deadline_s=60.0,
        ),
        state=ActionState.QUEUED,
        phase="",
        version=0,
        started_at=started_at,
        commands=(),
    )


def executor(actions: Actions, clock: ManualClock) -> Executor:
    return Executor(store=actions, wakeup=LocalWakeup(), clock=clock)


def turn(runner: Executor, clock: ManualClock, times: int) -> None:
    for _ in range(times):
        clock.now_s += max(runner.run_once(), 0.05)


def test_an_action_that_raises_leaves_the_others_alone_and_is_ended_as_failed() -> None:
    broken = action(1, hosts=())  # nobody has rank 0: advance() itself raises
    actions, clock = Actions(broken, action(2)), ManualClock()
    runner = executor(actions, clock)
    runner.run_once()
    assert actions.all["act-2"].phase == "start"
    assert actions.all["act-1"].state is ActionState.QUEUED
    turn(runner, clock, 200)
    assert actions.all["act-1"].state is ActionState.FAILED
    assert actions.all["act-2"].state is ActionState.DISPATCHED


def test_a_move_that_cannot_be_stored_is_tried_a_bounded_number_of_times() -> None:
    actions, clock = Actions(action(1), action(2)), ManualClock()
    tried: list[ActionState] = []

    def fault(action_id: str, step: PlaybookStep) -> None:
        if action_id == "act-1" and not step.state.ended:
            tried.append(step.state)
            raise ValueError("no column can hold it")

    actions.fault = fault
    runner = executor(actions, clock)
    turn(runner, clock, 200)
    assert len(tried) == MAX_FAULTS
    assert actions.all["act-1"].state is ActionState.FAILED
    assert actions.all["act-2"].phase == "start"


def test_an_outage_is_no_fault_of_an_action() -> None:
    actions, clock = Actions(action(1)), ManualClock()

    def away(_action_id: str, _step: PlaybookStep) -> None:
        raise Unreachable("The database does not answer.")

    actions.fault = away
    runner = executor(actions, clock)
    for _ in range(3 * MAX_FAULTS):
        with pytest.raises(Unreachable):
            runner.run_once()
    actions.fault = lambda _action_id, _step: None
    runner.run_once()
    assert actions.all["act-1"].phase == "start"


def test_an_executor_that_was_away_gives_hosts_time_to_answer() -> None:
    actions, clock = Actions(action(1)), ManualClock()
    executor(actions, clock).run_once()
    clock.now_s += 600.0
    successor = executor(actions, clock)
    successor.run_once()
    assert actions.all["act-1"].state is ActionState.DISPATCHED
    clock.now_s += 10.0 * AWAY_AFTER_S  # the process stood still
    turn(successor, clock, 1000)
    assert actions.all["act-1"].state is ActionState.DISPATCHED
    turn(successor, clock, 300)
    assert actions.all["act-1"].state is ActionState.TIMED_OUT
