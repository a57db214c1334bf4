"""What a start restores if no stopped host knows the job: the hosts that are to start it look into the store first."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import advance
from support.policy.played_actions import MIGRATE, NEXT, NOW, SPEC, answer, apply, begun, copy

from flyball.contracts.checkpoints import CheckpointSpec, JobHistory, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks
from flyball.contracts.decisions import ActionPlan, ActionState, CommandResult, DecisionKind, StopWorkers, UpdateState
from services.actuator.ports import ActionProgress
from services.actuator.rules.playbook import may_start

STORED = msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(persistent_dir="s3://bucket", persistent_every_s=60.0))
OWN_DISKS = msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(disk_dir="/nvme", disk_every_s=60.0))
DEFAULT_DISK = msgspec.structs.replace(
    SPEC, checkpoint=CheckpointSpec(disk_dir="/state", disk_every_s=60.0, disk_is_default=True)
)
PLAN = msgspec.structs.replace(MIGRATE, spec=STORED, warm_hosts=())
NOTHING = CommandResult(free_port=31_000)
IN_MEMORY = CommandResult(copies=(copy(58, 0, "a"), copy(58, 1, "a")))
BACK = msgspec.structs.replace(PLAN, generation=3, next=msgspec.structs.replace(NEXT, generation=4, parent=3))


def stored(step: int) -> tuple[ShardCopy, ...]:
    return tuple(copy(step, rank, "", Tier.PERSISTENT) for rank in (0, 1))


def told(plan: ActionPlan, found: CommandResult, *, known: int | None = 16) -> ActionProgress:
    """The action once its stopped host has answered. `known`: the newest step in the store by the database."""
    progress = msgspec.structs.replace(begun(plan), persistent_copies=stored(known) if known is not None else ())
    progress = apply(progress, advance(progress, NOW))
    return answer(progress, UpdateState.SUCCEEDED, {"a": found})


def test_a_store_that_nobody_looked_into_is_listed_before_a_start() -> None:
    """The database was restored from a backup, and the hosts lost their memory: step 16 is gone, and 40 is there."""
    progress = told(PLAN, NOTHING)
    step = advance(progress, NOW + 1)
    assert (step.phase, step.placement) == ("list", None)
    assert [d.command_id for d in step.commands] == ["act-9.list.a.1", "act-9.list.c.1"]
    history = JobHistory(STORED.checkpoint, NEXT.parent_lineage, NEXT.run)
    assert {d.body for d in step.commands} == {StopWorkers("job", 2, 0.0, history=history)}
    progress = apply(progress, step, NOW + 1)
    assert may_start(progress)
    assert not advance(progress, NOW + 2).commands
    listed = msgspec.structs.replace(NOTHING, copies=stored(32) + stored(40))
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": NOTHING, "c": listed}), NOW + 2)
    assert step.phase == "start" and step.restore is not None and step.restore.step == 40
    assert step.placement is not None and step.placement.master_port == 31_000


def test_hosts_that_cannot_look_into_the_store_do_not_hold_up_a_start() -> None:
    progress = told(PLAN, NOTHING)
    progress = apply(progress, advance(progress, NOW + 1), NOW + 1)
    progress = answer(progress, UpdateState.FAILED, {"a": CommandResult()}, code="unreachable")
    assert not advance(progress, NOW + 2).commands
    step = advance(progress, NOW + 19)  # c has not answered
    assert step.phase == "start" and step.restore is not None and step.restore.step == 16


def test_of_lost_hosts_the_spares_list_the_store() -> None:
    plan = msgspec.structs.replace(PLAN, stop_hosts=(), unreachable_hosts=("a", "b"))
    progress = msgspec.structs.replace(begun(plan), persistent_copies=stored(16))
    step = advance(progress, NOW)
    assert (step.phase, step.state) == ("list", ActionState.DISPATCHED)
    assert [d.command_id for d in step.commands] == ["act-9.list.a.1", "act-9.list.c.1"]
    progress = apply(progress, step)
    results = {"a": CommandResult(), "c": CommandResult(copies=stored(40))}
    step = advance(answer(progress, UpdateState.SUCCEEDED, results), NOW + 1)
    assert step.phase == "start" and step.restore is not None and step.restore.step == 40


@pytest.mark.parametrize(
    ("plan", "found", "known", "lists"),
    [
        (PLAN, NOTHING, None, True),
        (PLAN, CommandResult(copies=(copy(58, 0, "a"),)), None, False),  # it knows the job, and nothing is stored yet
        (PLAN, CommandResult(copies=(copy(58, 0, "a"),)), 16, True),  # it cannot have seen the store
        (PLAN, CommandResult(copies=stored(40)), 16, False),
        (PLAN, IN_MEMORY, 16, False),  # it cannot have seen the store, and needs not
        (PLAN, IN_MEMORY, 58, False),
        (PLAN, IN_MEMORY, 60, True),
        (BACK, IN_MEMORY, 16, True),  # of an older generation: the newest one's hosts may be those that are lost
        (msgspec.structs.replace(PLAN, spec=OWN_DISKS), NOTHING, None, True),
        (msgspec.structs.replace(PLAN, spec=DEFAULT_DISK), NOTHING, None, False),
        (msgspec.structs.replace(PLAN, spec=SPEC), NOTHING, None, False),
        (msgspec.structs.replace(PLAN, next=msgspec.structs.replace(NEXT, parent_lineage=())), NOTHING, None, False),
    ],
)
def test_only_a_job_that_nobody_knows_is_looked_for(
    plan: ActionPlan, found: CommandResult, known: int | None, lists: bool
) -> None:
    assert (advance(told(plan, found, known=known), NOW + 1).phase == "list") is lists


def test_a_job_that_goes_on_after_its_end_is_listed_once() -> None:
    history = JobHistory(STORED.checkpoint, NEXT.parent_lineage)
    plan = msgspec.structs.replace(PLAN, kind=DecisionKind.START_JOB, history=history)
    assert advance(told(plan, NOTHING), NOW + 1).phase == "start"


def test_a_known_step_is_asked_for_again_before_the_store_is_listed() -> None:
    """An engine that was still scanning lists nothing at first."""
    plan = msgspec.structs.replace(PLAN, next=msgspec.structs.replace(NEXT, known_step=57))
    progress = told(plan, NOTHING, known=None)
    for n in (2, 3):
        step = advance(progress, NOW + n)
        assert (step.phase, [d.command_id for d in step.commands]) == ("stop", [f"act-9.stop.a.{n}"])
        progress = answer(apply(progress, step, NOW + n), UpdateState.SUCCEEDED, {"a": NOTHING})
    step = advance(progress, NOW + 4)
    assert step.phase == "list"
    progress = apply(progress, step, NOW + 4)
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": NOTHING, "c": NOTHING}), NOW + 5)
    assert step.state is ActionState.FAILED
    found = msgspec.structs.replace(NOTHING, copies=stored(57))
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": found, "c": found}), NOW + 5)
    assert step.restore is not None and step.restore.step == 57


def test_a_job_whose_copies_no_host_can_list_does_not_start_from_scratch() -> None:
    """The database knows no stored step, and the store may hold some all the same."""
    progress = told(PLAN, NOTHING, known=None)
    progress = apply(progress, advance(progress, NOW + 1), NOW + 1)
    failed = answer(progress, UpdateState.FAILED, {"a": NOTHING}, message="s3://bucket is unreachable")
    step = advance(failed, NOW + 19)  # c has not answered
    assert (step.state, step.commands) == (ActionState.FAILED, ())
    assert advance(progress, NOW + 19).message.startswith("a, c did not answer. ")
    step = advance(answer(failed, UpdateState.SUCCEEDED, {"c": NOTHING}), NOW + 19)
    assert step.phase == "start" and step.restore is None, "c has looked, and there is nothing"


LATE = msgspec.structs.replace(MIGRATE, stop_hosts=("a", "b"), unreachable_hosts=(), warm_hosts=())
ON_BOTH = {"a": CommandResult(copies=(copy(58, 0, "a"),)), "b": CommandResult(copies=(copy(58, 1, "b"),))}


def listed_before(plan: ActionPlan, addresses: dict[str, str]) -> ActionProgress:
    """The action once its stopped hosts have listed step 58, of which the engines have these addresses."""
    progress = msgspec.structs.replace(begun(plan), engine_addresses=addresses)
    progress = apply(progress, advance(progress, NOW))
    return answer(progress, UpdateState.SUCCEEDED, {host: ON_BOTH[host] for host in plan.stop_hosts})


def test_an_engine_without_an_address_yet_is_awaited_and_no_step_given_up() -> None:
    """It was started with its daemon: the copies were listed before its address was known."""
    progress = listed_before(LATE, {"a": "a:7", "c": "c:7"})
    for now in (NOW + 0.1, NOW + 29.0):
        step = advance(progress, now)
        assert (step.phase, step.commands, step.placement) == ("stop", (), None)
        assert now < step.wake_at <= NOW + 30.0
    known = msgspec.structs.replace(progress, engine_addresses={"a": "a:7", "b": "b:9", "c": "c:7"})
    step = advance(known, NOW + 1)
    assert step.phase == "start" and step.restore is not None and step.restore.step == 58
    assert [source.engine_address for source in step.restore.sources["1"]] == ["b:9"]


def test_ranks_of_another_layout_do_not_start_from_scratch_beside_their_steps() -> None:
    """Any rank may need any shard of another number of ranks, so not even those of its own host are at home."""
    three = msgspec.structs.replace(SPEC, nnodes=1, nproc_per_node=3)
    lineage = (LineageEntry(2, world_size=2),)
    hosts = (HostRanks("a", "10.0.0.1", "", (0, 1, 2)),)
    following = msgspec.structs.replace(NEXT, hosts=hosts, peers={"a": ()}, parent_lineage=lineage)
    plan = msgspec.structs.replace(LATE, spec=three, stop_hosts=("a",), next=following)
    progress = msgspec.structs.replace(begun(plan), engine_addresses={})
    progress = apply(progress, advance(progress, NOW))
    progress = answer(
        progress, UpdateState.SUCCEEDED, {"a": CommandResult(copies=(copy(58, 0, "a"), copy(58, 1, "a")))}
    )
    assert advance(progress, NOW + 1).placement is None
    step = advance(msgspec.structs.replace(progress, engine_addresses={"a": "a:7"}), NOW + 1)
    assert step.restore is not None and step.restore.step == 58


def test_a_step_that_nobody_can_read_ends_the_action_and_is_not_passed_over() -> None:
    step = advance(listed_before(LATE, {"a": "a:7", "c": "c:7"}), NOW + 30.0)
    assert (step.state, step.placement) == (ActionState.FAILED, None)


def test_the_wait_for_an_engine_begins_with_the_answer_and_not_while_the_supervisor_is_away() -> None:
    progress = listed_before(LATE, {"a": "a:7", "c": "c:7"})
    late = tuple(
        msgspec.structs.replace(record, update=msgspec.structs.replace(record.update, at=NOW + 20.0))
        for record in progress.commands
        if record.update is not None
    )
    for waits in (
        msgspec.structs.replace(progress, commands=late),  # the stop took long
        msgspec.structs.replace(progress, watched_since=NOW + 20.0),
    ):
        assert advance(waits, NOW + 49.0).wake_at > NOW + 49.0
        assert advance(waits, NOW + 50.0).state is ActionState.FAILED


def test_an_engine_whose_copies_are_not_needed_is_not_awaited() -> None:
    progress = listed_before(LATE, {"a": "a:7", "c": "c:7"})
    stored_too = msgspec.structs.replace(
        progress, persistent_copies=(copy(58, 0, "", Tier.PERSISTENT), copy(58, 1, "", Tier.PERSISTENT))
    )
    step = advance(stored_too, NOW + 1)
    assert step.phase == "start" and step.restore is not None and step.restore.step == 58
