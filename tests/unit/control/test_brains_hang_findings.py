"""Who is to blame for a hang, from where the ranks stand; and the look at them before anything is stopped."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import advance, decide
from support.policy.views import NOW, SAVED, SETTINGS, SPEC, action, decided, incident, say, view

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    IncidentState,
    TakeStacks,
    UpdateState,
)
from flyball.contracts.identity import Fence
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import RankStalled
from services.actuator.ports import ActionProgress, OutboxCommand
from services.record.answers import sum_up
from services.rules import hang_findings

REDUCES = RankStand(
    0,
    "collective",
    "all_reduce",
    "all_reduce (torch/distributed/distributed_c10d.py:3252)",
    "main (train.py:97)",
    "in futex",
)
LOADS = RankStand(
    2, "data_loader", "", "_next_data (torch/utils/data/dataloader.py:1505)", "main (train.py:94)", "in poll"
)
LOCKED = RankStand(2, "lock", "", "deadlock (train.py:47)", "", "in futex")


def at(stand: RankStand, *ranks: int) -> list[RankStand]:
    return [msgspec.structs.replace(stand, rank=rank) for rank in ranks]


@pytest.mark.parametrize(
    ("stands", "culprits"),
    [
        ([*at(REDUCES, 0, 1, 3), LOADS], (2,)),
        ([*at(REDUCES, 3), *at(LOADS, 0, 1, 2)], (0, 1, 2)),  # a collective waits, whoever is in it
        ([*at(REDUCES, 0, 1, 3), msgspec.structs.replace(REDUCES, rank=2, call="barrier")], (2,)),
        ([*at(REDUCES, 0, 1, 3), msgspec.structs.replace(REDUCES, rank=2, caller="other (train.py:9)")], (2,)),
        ([*at(REDUCES, 0, 1), RankStand(2, "stopped")], (2,)),
        ([*at(LOADS, 0, 1), RankStand(2, "stopped"), LOCKED], (2,)),
        (at(REDUCES, 0, 1, 2, 3), ()),
        ([*at(REDUCES, 0, 1), *at(msgspec.structs.replace(REDUCES, call="barrier"), 2, 3)], ()),
        ([*at(LOCKED, 0, 1), *at(LOADS, 2, 3)], ()),
        ([*at(LOADS, 0, 1, 3), LOCKED], (2,)),
        ([*at(REDUCES, 0, 1), LOCKED, RankStand(3, "unknown", note="no stack")], (2,)),
        ([*at(REDUCES, 0, 1, 2), RankStand(3, "unknown", note="no stack")], (3,)),
        ([LOCKED], (2,)),
        ([*at(REDUCES, 0, 1), RankStand(2, "of_a_newer_release")], (2,)),
    ],
)
def test_the_rank_that_the_others_wait_for(stands: list[RankStand], culprits: tuple[int, ...]) -> None:
    found = hang_findings.find(reversed(stands))
    assert found is not None and found.culprits == culprits
    assert found.sentence.endswith(".") and found.evidence.get("culprits", "") == ",".join(map(str, culprits))


def test_without_stands_nothing_is_found() -> None:
    assert hang_findings.find([]) is None


def test_the_sentence() -> None:
    found = hang_findings.find([*at(REDUCES, 0, 1, 3), LOADS])
    assert found is not None and found.sentence == (
        "Ranks 0, 1, 3 wait in all_reduce (all_reduce (torch/distributed/distributed_c10d.py:3252); called from "
        "main (train.py:97); in futex); rank 2 stands in the data loader (_next_data (torch/utils/data/dataloader.py:"
        "1505); called from main (train.py:94); in poll)."
    )
    assert found.evidence == {"culprits": "2", "stands": "0,1,3: collective all_reduce; 2: data_loader"}


# --- the look ---------------------------------------------------------------------------------------------------------

STALLED = RankStalled("job", 2, (0, 1), Phase.STEP, 50, 301.0, 300.0, stance="together", seen="all ranks are idle")


def test_stacks_are_taken_before_anything_is_stopped() -> None:
    outcome = decide(view(copies=SAVED), [say(STALLED, source="sensor.a")], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (DecisionKind.TAKE_STACKS, "see_where_ranks_stand")
    assert decision.action is not None and decision.action.next is None
    assert (decision.action.stop_hosts, decision.action.generation) == (("a", "b"), 2)
    assert outcome.incidents[-1].state is IncidentState.ACTING and outcome.incidents[-1].decisions_made == 0


@pytest.mark.parametrize("stance", ["", "frozen", "suspended"])
def test_a_stopped_process_needs_no_look(stance: str) -> None:
    body = msgspec.structs.replace(STALLED, stance=stance)
    decision = decided(decide(view(copies=SAVED), [say(body, source="sensor.a")], SETTINGS, NOW))
    assert decision.kind is DecisionKind.RESTART_IN_PLACE


def looked(*stands: RankStand, state: ActionState = ActionState.SUCCEEDED):
    plan = ActionPlan(DecisionKind.TAKE_STACKS, "job", SPEC, 2, stop_hosts=("a", "b"))
    acting = incident(cause="rank_stalled", generation=2, host_id="a", message="Ranks 0, 1 stand.", decisions_made=0)
    seen = action(plan=plan, state=state, phase="stacks", stands=stands, incident_id="inc-1")
    return view(incidents=[acting], actions=[seen], copies=SAVED)


def test_then_the_job_restarts_and_the_culprits_host_is_blamed() -> None:
    outcome = decide(
        looked(msgspec.structs.replace(REDUCES, rank=0), msgspec.structs.replace(LOADS, rank=1)), [], SETTINGS, NOW
    )
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "restart_in_place")
    assert decision.evidence["culprits"] == "1"
    assert outcome.incidents[-1].host_id == "b" and outcome.incidents[-1].decisions_made == 1


@pytest.mark.parametrize("state", [ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT])
def test_a_look_that_showed_nothing_holds_nothing_up(state: ActionState) -> None:
    seen = looked(state=state)
    outcome = decide(seen, [say(STALLED, source="sensor.b")], SETTINGS, NOW)  # told once more by another sensor
    assert decided(outcome).kind is DecisionKind.RESTART_IN_PLACE
    assert "culprits" not in decided(outcome).evidence and outcome.incidents[-1].host_id == "a"


def progress(
    *commands: OutboxCommand, phase: str = "stacks", state: ActionState = ActionState.DISPATCHED
) -> ActionProgress:
    plan = ActionPlan(DecisionKind.TAKE_STACKS, "job", SPEC, 2, stop_hosts=("a", "b"), deadline_s=4.0)
    return ActionProgress("act-1", "dec-1", "inc-1", plan, state, phase, 1, NOW, commands)


def command(host: str, answer: UpdateState | None, *stands: RankStand) -> OutboxCommand:
    name = f"act-1.stacks.{host}.1"
    body = TakeStacks("job", 2, 2.0)
    update = CommandUpdate(name, host, "i", answer, NOW, result=CommandResult(stands=stands)) if answer else None
    return OutboxCommand(Command(name, "act-1", host, Fence(1, 2), body, 4.0), "stacks", NOW, update)


def test_the_playbook_asks_all_hosts_and_ends_well_whatever_they_answer() -> None:
    begun = advance(progress(phase="", state=ActionState.QUEUED), NOW)
    assert [draft.body for draft in begun.commands] == [TakeStacks("job", 2, 2.0)] * 2
    done, failed, away = UpdateState.SUCCEEDED, UpdateState.FAILED, None
    assert advance(progress(command("a", done), command("b", away)), NOW + 1.0).state is ActionState.DISPATCHED
    assert advance(progress(command("a", done), command("b", done)), NOW + 1.0).state is ActionState.SUCCEEDED
    assert advance(progress(command("a", done), command("b", failed)), NOW + 1.0).state is ActionState.SUCCEEDED
    assert advance(progress(command("a", away), command("b", away)), NOW + 4.0).state is ActionState.SUCCEEDED


def test_answers_are_summed_up_by_rank_and_without_stacks() -> None:
    stack = msgspec.structs.replace(REDUCES, stack="frames")
    updates = [command("b", UpdateState.SUCCEEDED, LOADS).update, command("a", UpdateState.SUCCEEDED, stack).update]
    assert sum_up(update for update in updates if update).stands == (REDUCES, LOADS)
