"""How decisions are carried out."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from support.policy.checked import advance
from support.policy.played_actions import MIGRATE, NEXT, NOW, SPEC, answer, apply, begun, copy

from flyball.contracts.checkpoints import STATE_DIR_DISK, CheckpointSpec, JobHistory, LineageEntry, Tier
from flyball.contracts.cluster import IN_MEMORY_ALONE, HostRanks
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    CommandResult,
    DecisionKind,
    EndJob,
    FlushState,
    RankPosition,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    UpdateState,
    WarmUp,
)
from services.actuator.ports import ActionProgress, PlaybookStep
from services.actuator.rules import step_names
from services.actuator.rules.playbook import may_start

STATE_DIR_DISKS = msgspec.structs.replace(
    SPEC, checkpoint=CheckpointSpec(disk_dir=STATE_DIR_DISK, disk_every_s=600.0, disk_is_default=True)
)


STOPPED = CommandResult(
    positions=(RankPosition(0, 58),),
    copies=(copy(57, 0, "a"), copy(58, 0, "a"), copy(57, 1, "a", Tier.PEER)),
    free_port=31_000,
)


def test_a_migration_stops_then_starts() -> None:
    progress = begun(MIGRATE)
    step = advance(progress, NOW)
    assert (step.phase, step.state) == ("stop", ActionState.DISPATCHED)
    assert [(d.command_id, type(d.body)) for d in step.commands] == [
        ("act-9.stop.a.1", StopWorkers),
        ("act-9.warm.c.1", WarmUp),
    ]
    progress = apply(progress, step)
    waiting = advance(progress, NOW + 1)
    assert not waiting.commands and (waiting.phase, waiting.state) == ("stop", ActionState.DISPATCHED)
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": STOPPED})
    step = advance(progress, NOW + 1)
    assert [d.command_id for d in step.commands] == ["act-9.start.a.1", "act-9.start.c.1"]
    placement = step.placement
    assert placement is not None and placement.restore is not None and step.restore == placement.restore
    assert placement.restore.step == 57  # 58 is not complete without the lost host
    assert (placement.master_address, placement.master_port) == ("10.0.0.1", 31_000)
    assert placement.lineage == (LineageEntry(2, 57), LineageEntry(3, world_size=2)) and placement.run == NEXT.run
    assert placement.hosts[0].engine_address == "a:7"  # the newest that is known
    (source,) = placement.restore.sources["1"]
    assert (source.host_id, source.tier, source.engine_address) == ("a", Tier.PEER, "a:7")
    assert all(isinstance(d.body, StartWorkers) and d.body.placement == placement for d in step.commands)
    progress = answer(apply(progress, step), UpdateState.SUCCEEDED, {"a": CommandResult(), "c": CommandResult()})
    done = advance(progress, NOW + 2)
    assert done.state is ActionState.SUCCEEDED
    assert advance(apply(progress, done), NOW + 3).state is ActionState.SUCCEEDED


@pytest.mark.parametrize(
    ("own", "left"),
    [
        (False, (LineageEntry(2, 57), LineageEntry(4, world_size=2))),
        (True, (LineageEntry(2, 50), LineageEntry(3, 57), LineageEntry(4, world_size=2))),
    ],
)
def test_a_generation_that_reported_no_step_counts_if_a_copy_is_found(
    own: bool, left: tuple[LineageEntry, ...]
) -> None:
    """Generation 3 restored step 50 and reported nothing since: the bus was away."""
    history = (LineageEntry(2), LineageEntry(3, after_step=50))
    both = msgspec.structs.replace(NEXT, generation=4, parent=3, parent_lineage=history)
    progress = begun(msgspec.structs.replace(MIGRATE, next=both))
    progress = apply(progress, advance(progress, NOW))
    made = [msgspec.structs.replace(copy, generation=3 if own else 2) for copy in STOPPED.copies]
    stopped = msgspec.structs.replace(STOPPED, copies=tuple(made))
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": stopped}), NOW + 1)
    assert step.placement is not None
    assert step.placement.lineage == left


def test_a_first_start_has_nothing_to_stop_or_restore() -> None:
    plan = msgspec.structs.replace(
        MIGRATE,
        kind=DecisionKind.START_JOB,
        stop_hosts=(),
        unreachable_hosts=(),
        next=msgspec.structs.replace(NEXT, parent_lineage=(), parent=None),
    )
    step = advance(begun(plan), NOW)
    assert step.phase == "start" and step.placement is not None and step.placement.restore is None
    assert step.placement.master_port == 29_500
    assert [d.command_id for d in step.commands] == ["act-9.start.a.1", "act-9.start.c.1", "act-9.warm.c.1"]


def test_when_every_host_is_lost_nobody_is_waited_for() -> None:
    plan = msgspec.structs.replace(MIGRATE, stop_hosts=(), unreachable_hosts=("a", "b"), warm_hosts=())
    progress = msgspec.structs.replace(
        begun(plan), persistent_copies=tuple(copy(50, rank, "", Tier.PERSISTENT) for rank in (0, 1))
    )
    step = advance(progress, NOW)
    assert step.phase == "start" and step.restore is not None and step.restore.step == 50


def test_a_failed_stop_is_tried_three_times() -> None:
    progress = apply(begun(MIGRATE), advance(begun(MIGRATE), NOW))
    for number in (2, 3):
        progress = answer(progress, UpdateState.FAILED, {"a": CommandResult()}, message="no disk")
        step = advance(progress, NOW)
        assert [d.command_id for d in step.commands] == [f"act-9.stop.a.{number}"]
        progress = apply(progress, step)
    progress = answer(progress, UpdateState.FAILED, {"a": CommandResult()}, message="no disk")
    step = advance(progress, NOW)
    assert step.state is ActionState.FAILED


def started() -> ActionProgress:
    progress = apply(begun(MIGRATE), advance(begun(MIGRATE), NOW))
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": STOPPED})
    return apply(progress, advance(progress, NOW))


def test_a_failed_start_is_not_repeated_within_its_generation() -> None:
    progress = answer(started(), UpdateState.FAILED, {"c": CommandResult()}, message="script missing")
    assert advance(progress, NOW).state is ActionState.FAILED


def test_a_refused_start_did_nothing_and_is_asked_again_to_the_letter() -> None:
    progress = started()
    first = [r.command.body for r in progress.commands if r.command.command_id == "act-9.start.c.1"]
    progress = answer(progress, UpdateState.REFUSED, {"c": CommandResult()}, code="stale_command")
    # By now other copies are known, but the placement stands.
    progress = msgspec.structs.replace(
        progress, persistent_copies=tuple(copy(99, rank, "", Tier.PERSISTENT) for rank in (0, 1))
    )
    step = advance(progress, NOW)
    (again,) = step.commands
    assert again.command_id == "act-9.start.c.2" and [again.body] == first and step.placement is None
    for _ in range(2):
        progress = answer(apply(progress, advance(progress, NOW)), UpdateState.REFUSED, {"c": CommandResult()})
    assert advance(progress, NOW).state is ActionState.FAILED


def test_a_known_step_that_is_not_told_of_is_asked_for_again_before_it_is_given_up() -> None:
    plan = msgspec.structs.replace(MIGRATE, next=msgspec.structs.replace(NEXT, known_step=57))
    forgetful = CommandResult(positions=(RankPosition(0, 58),))  # its engine was away
    progress = apply(begun(plan), advance(begun(plan), NOW))
    for number in (2, 3):
        progress = answer(progress, UpdateState.SUCCEEDED, {"a": forgetful})
        step = advance(progress, NOW)
        assert step.phase == "stop" and [d.command_id for d in step.commands] == [f"act-9.stop.a.{number}"]
        progress = apply(progress, step)
    told = advance(answer(progress, UpdateState.SUCCEEDED, {"a": STOPPED}), NOW)
    assert told.phase == "start" and told.restore is not None and told.restore.step == 57
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": forgetful}), NOW)
    assert step.state is ActionState.FAILED


def test_a_host_that_does_not_answer_ends_the_action() -> None:
    progress = apply(begun(MIGRATE), advance(begun(MIGRATE), NOW))
    wake_at = advance(progress, NOW + 1).wake_at
    assert NOW + 15 <= wake_at <= NOW + 18
    step = advance(progress, wake_at)
    assert step.state is ActionState.TIMED_OUT


def test_an_action_has_a_deadline() -> None:
    progress = started()
    assert advance(progress, NOW + 60).state is ActionState.TIMED_OUT


def test_time_in_which_no_actuator_was_there_to_answer_does_not_count() -> None:
    stopping = apply(begun(MIGRATE), advance(begun(MIGRATE), NOW))
    back = msgspec.structs.replace(stopping, watched_since=NOW + 600.0)
    waiting = advance(back, NOW + 601.0)
    assert waiting.state is ActionState.DISPATCHED and not waiting.commands and waiting.wake_at > NOW + 601.0
    starting = advance(answer(back, UpdateState.SUCCEEDED, {"a": STOPPED}), NOW + 602.0)
    assert starting.phase == "start" and starting.commands[0].deadline_s == 58.0
    assert advance(back, NOW + 660.0).state is ActionState.TIMED_OUT
    save = ActionPlan(DecisionKind.EMERGENCY_CHECKPOINT, "job", SPEC, 2, stop_hosts=("a",), emergency_step=60)
    saving = msgspec.structs.replace(apply(begun(save), advance(begun(save), NOW)), watched_since=NOW + 600.0)
    assert advance(saving, NOW + 601.0).state is ActionState.TIMED_OUT  # the host that goes does not wait either


def test_what_was_done_while_no_actuator_looked_is_done() -> None:
    progress = answer(started(), UpdateState.SUCCEEDED, {"a": CommandResult(), "c": CommandResult()})
    assert advance(progress, NOW + 600).state is ActionState.SUCCEEDED
    half = answer(started(), UpdateState.SUCCEEDED, {"a": CommandResult()})
    assert advance(half, NOW + 600).state is ActionState.TIMED_OUT


# --- emergency saves -------------------------------------------------------------------------------------------------

SAVE = ActionPlan(
    DecisionKind.EMERGENCY_CHECKPOINT,
    "job",
    SPEC,
    generation=2,
    stop_hosts=("a", "b"),
    emergency_step=60,
    deadline_s=20.0,
)


def steps_named(step: PlaybookStep) -> set[int]:
    return {d.body.step for d in step.commands if isinstance(d.body, SaveEmergency)}


def test_an_emergency_save_is_armed_then_done() -> None:
    progress = apply(begun(SAVE), advance(begun(SAVE), NOW))
    assert {d.host_id for d in advance(begun(SAVE), NOW).commands} == {"a", "b"}
    progress = answer(progress, UpdateState.ACKNOWLEDGED, {"a": CommandResult()})
    assert advance(progress, NOW).state is ActionState.DISPATCHED
    progress = answer(progress, UpdateState.ACKNOWLEDGED, {"b": CommandResult()})
    assert advance(progress, NOW).state is ActionState.ACKNOWLEDGED
    progress = apply(progress, advance(progress, NOW))
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()})
    assert advance(progress, NOW).state is ActionState.SUCCEEDED


def test_a_step_that_was_passed_is_named_anew_for_all() -> None:
    progress = apply(begun(SAVE), advance(begun(SAVE), NOW))
    progress = answer(progress, UpdateState.ACKNOWLEDGED, {"a": CommandResult()})
    late = CommandResult(positions=(RankPosition(1, 63),))
    progress = answer(progress, UpdateState.FAILED, {"b": late}, code="too_late")
    step = advance(progress, NOW)
    assert steps_named(step) == {69} and step.attempt == 2
    assert [d.command_id for d in step.commands] == ["act-9.save.a.2", "act-9.save.b.2"]
    progress = apply(progress, step)
    waits = advance(progress, NOW)
    assert not waits.commands and waits.attempt == 2  # the answers to the first name count no more
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()})
    assert advance(progress, NOW).state is ActionState.SUCCEEDED


def test_a_step_is_not_named_for_ever() -> None:
    progress = apply(begun(SAVE), advance(begun(SAVE), NOW))
    named = [60]
    for _ in range(step_names.MAX_NAMES - 1):
        late = CommandResult(positions=(RankPosition(0, named[-1] + 5),))
        progress = answer(progress, UpdateState.FAILED, {"a": late, "b": late}, code="too_late")
        assert flushed(advance(progress, progress.deadline_at - 0.01)) == {}, "there is time"
        step = advance(progress, NOW)
        named += steps_named(step)
        progress = apply(progress, step)
    leads = [later - earlier for earlier, later in pairwise(named)]
    assert leads == sorted(leads), "none is less far ahead than the one before"
    progress = answer(progress, UpdateState.FAILED, {"a": CommandResult()}, code="too_late")
    assert flushed(advance(progress, NOW)) == {"a": True, "b": True}


def test_the_next_name_is_ahead_by_more_than_ranks_went_between_two_answers() -> None:
    """As with a supervisor that answers late."""
    progress = apply(begun(SAVE), advance(begun(SAVE), NOW))
    for at, named in ((90, 90 + 2 * (90 - 60)), (170, 170 + 2 * (170 - 90)), (340, 340 + 2 * (340 - 170))):
        late = CommandResult(positions=(RankPosition(0, at), RankPosition(1, at - 1)))
        progress = answer(progress, UpdateState.FAILED, {"a": late, "b": CommandResult()}, code="too_late")
        step = advance(progress, NOW)
        assert steps_named(step) == {named}
        progress = apply(progress, step)


def flushed(step: PlaybookStep) -> dict[str, bool]:
    """By host whether its ranks are let go."""
    return {d.host_id: d.body.disarm for d in step.commands if isinstance(d.body, FlushState)}


DURABLE = msgspec.structs.replace(
    SAVE,
    spec=msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(persistent_dir="/store", persistent_every_s=60.0)),
)


def test_a_step_that_is_saved_is_brought_to_the_slow_tiers_in_the_time_that_is_left() -> None:
    step = advance(begun(DURABLE), NOW)
    assert [d.body.deadline_s for d in step.commands if isinstance(d.body, SaveEmergency)] == [10.0, 10.0]
    progress = apply(begun(DURABLE), step)
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()})
    step = advance(progress, NOW + 4.0)
    assert flushed(step) == {"a": False, "b": False}
    assert [d.body.timeout_s for d in step.commands if isinstance(d.body, FlushState)] == [15.0, 15.0]
    progress = apply(progress, step, NOW + 4.0)
    there = CommandResult(flushed={"persistent": 60})
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": there})
    done = advance(answer(progress, UpdateState.SUCCEEDED, {"b": there}), NOW + 5.0)
    assert done.state is ActionState.SUCCEEDED
    late = advance(progress, NOW + 20.0)  # b did not answer: the step is saved all the same, and the host goes now
    assert late.state is ActionState.SUCCEEDED


@pytest.mark.parametrize("plan", [SAVE, DURABLE])
def test_the_newest_recovery_point_is_flushed_if_a_rank_hangs(plan: ActionPlan) -> None:
    progress = apply(begun(plan), advance(begun(plan), NOW))
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult()})
    progress = answer(progress, UpdateState.FAILED, {"b": CommandResult()}, code="not_saved", message="rank 1 hangs")
    step = advance(progress, NOW + 10.0)
    assert step.phase == "flush"
    assert flushed(step) == {"a": True, "b": True}
    progress = apply(progress, step, NOW + 10.0)
    there = CommandResult(flushed={"persistent": 57})
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": there, "b": there})
    step = advance(progress, NOW + 11.0)
    assert step.state is ActionState.FAILED
    if plan is DURABLE:
        assert "The newest recovery point was flushed instead (a has persistent step 57" in step.message
    else:
        assert "The newest recovery point in memory counts instead" in step.message


RESUME = ActionPlan(DecisionKind.RESUME, "job", SPEC, generation=2, stop_hosts=("a", "b"), emergency_step=57)


def test_ranks_that_stand_are_let_go_by_taking_their_step_back() -> None:
    step = advance(begun(RESUME), NOW)
    assert (step.phase, flushed(step)) == ("release", {"a": True, "b": True})
    progress = apply(begun(RESUME), step)
    done = advance(answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()}), NOW)
    assert done.state is ActionState.SUCCEEDED


def test_a_host_that_cannot_let_its_ranks_go_is_asked_three_times() -> None:
    progress = apply(begun(RESUME), advance(begun(RESUME), NOW))
    for _ in range(2):
        progress = answer(progress, UpdateState.FAILED, {"b": CommandResult()}, message="the engine is away")
        again = advance(progress, NOW)
        assert [draft.host_id for draft in again.commands] == ["b"]
        progress = apply(progress, again)
    ended = advance(answer(progress, UpdateState.FAILED, {"b": CommandResult()}, message="the engine is away"), NOW)
    assert ended.state is ActionState.FAILED


def test_a_job_that_is_stopped_saves_a_last_step_if_one_is_named_and_is_stopped_in_any_case() -> None:
    plan = msgspec.structs.replace(DURABLE, kind=DecisionKind.STOP_JOB, grace_s=5.0, deadline_s=100.0)
    step = advance(begun(plan), NOW)
    assert step.phase == "save"
    assert [d.body.deadline_s for d in step.commands if isinstance(d.body, SaveEmergency)] == [5.0, 5.0]
    progress = apply(begun(plan), step)
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult()})
    failed = answer(progress, UpdateState.FAILED, {"b": CommandResult()}, code="not_saved")
    assert advance(failed, NOW + 5.0).phase == "stop"
    assert advance(progress, NOW + 9.0).phase == "stop"  # b says nothing
    for first_step, phase in ((0, "save"), (-1, "stop")):
        assert advance(begun(msgspec.structs.replace(plan, emergency_step=first_step)), NOW).phase == phase


def test_what_ends_a_job_brings_its_newest_step_to_the_slow_tiers_before_its_memory_is_freed() -> None:
    for kind in (DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB, DecisionKind.COMPLETE_JOB):
        plan = msgspec.structs.replace(DURABLE, kind=kind, deadline_s=100.0, emergency_step=-1)
        step = advance(begun(plan), NOW)
        assert step.phase == "stop"
        assert all(isinstance(d.body, StopWorkers) and d.body.durable for d in step.commands)
        assert all(d.deadline_s > d.body.flush_timeout_s for d in step.commands if isinstance(d.body, StopWorkers))
    for lacks_ranks in (True, False):  # no step could be complete; or the host that is gone had left the job before
        plan = msgspec.structs.replace(
            DURABLE, kind=DecisionKind.FAIL_JOB, unreachable_hosts=("c",), lacks_ranks=lacks_ranks
        )
        bodies = [d.body for d in advance(begun(plan), NOW).commands if isinstance(d.body, StopWorkers)]
        assert bodies and all(body.durable is not lacks_ranks for body in bodies)


# --- the end of a job ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB])
def test_a_job_ends_everywhere_though_one_host_does_not_answer(kind: DecisionKind) -> None:
    plan = msgspec.structs.replace(SAVE, kind=kind, grace_s=5.0, deadline_s=50.0, emergency_step=-1)
    progress = apply(begun(plan), advance(begun(plan), NOW))
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult()})
    assert not advance(progress, NOW + 10).commands
    step = advance(progress, NOW + 22)  # grace, time to stop, time to answer: over
    assert step.phase == "end" and {d.host_id for d in step.commands} == {"a", "b"}
    assert all(isinstance(d.body, EndJob) for d in step.commands)
    progress = apply(progress, step, NOW + 22)
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()})
    assert advance(progress, NOW + 23).state is ActionState.SUCCEEDED


@pytest.mark.parametrize("kind", [DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB])
def test_memory_is_freed_when_the_default_disks_of_all_hosts_have_the_newest_step(kind: DecisionKind) -> None:
    history = JobHistory(STATE_DIR_DISKS.checkpoint, (LineageEntry(2),))
    plan = msgspec.structs.replace(SAVE, kind=kind, spec=STATE_DIR_DISKS, history=history, emergency_step=-1)
    stopping = apply(begun(plan), advance(begun(plan), NOW))
    kept = {}
    for written in ("ab", "a", ""):
        found = {
            host: CommandResult(copies=(copy(58, rank, host), *([copy(58, rank, host, Tier.DISK)] * (host in written))))
            for rank, host in enumerate("ab")
        }
        step = advance(answer(stopping, UpdateState.SUCCEEDED, found), NOW)
        ((kept[written], dropped),) = {
            (d.body.keep_memory, d.body.drop_disk) for d in step.commands if isinstance(d.body, EndJob)
        }
        assert not dropped
    assert kept == {"ab": False, "a": True, "": True}


def test_a_job_that_succeeds_keeps_what_its_store_has_not_and_its_record_says_so() -> None:
    history = JobHistory(DURABLE.spec.checkpoint, (LineageEntry(2),))
    plan = msgspec.structs.replace(
        DURABLE, kind=DecisionKind.COMPLETE_JOB, history=history, emergency_step=-1, deadline_s=300.0
    )
    stopping = apply(begun(plan), advance(begun(plan), NOW))
    for stored, answers, said in (
        (58, "ab", ""),
        (40, "ab", "step 58 could not be written to"),
        (-1, "ab", "which has no step"),
        (58, "a", "b did not say whether"),
    ):
        found = {
            host: CommandResult(
                copies=(copy(58, rank, host), *([copy(stored, rank, "", Tier.PERSISTENT)] if stored >= 0 else []))
            )
            for rank, host in enumerate("ab")
        }
        told = answer(stopping, UpdateState.SUCCEEDED, {host: found[host] for host in answers})
        step = advance(told, NOW + (0 if answers == "ab" else 200))
        assert step.phase == "end"
        kept = {d.body.keep_memory for d in step.commands if isinstance(d.body, EndJob)}
        assert kept == {bool(said)}
        assert (IN_MEMORY_ALONE in step.job_message, said in step.job_message) == (bool(said), True)


def test_the_default_disks_of_the_hosts_go_when_the_job_succeeds() -> None:
    plan = msgspec.structs.replace(SAVE, kind=DecisionKind.COMPLETE_JOB, spec=STATE_DIR_DISKS)
    step = advance(begun(plan), NOW)
    assert step.phase == "end"
    assert [d.body.drop_disk for d in step.commands if isinstance(d.body, EndJob)] == [True, True]


def test_a_completed_job_is_only_tidied_up() -> None:
    plan = msgspec.structs.replace(SAVE, kind=DecisionKind.COMPLETE_JOB)
    step = advance(begun(plan), NOW)
    assert step.phase == "end"
    progress = apply(begun(plan), step)
    progress = answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult(), "b": CommandResult()})
    assert advance(progress, NOW).state is ActionState.SUCCEEDED


def test_stray_workers_are_stopped_and_nothing_else() -> None:
    plan = ActionPlan(DecisionKind.CORDON, "job", SPEC, generation=1, stop_hosts=("c",))
    progress = apply(begun(plan), advance(begun(plan), NOW))
    progress = answer(progress, UpdateState.SUCCEEDED, {"c": CommandResult()})
    assert advance(progress, NOW).state is ActionState.SUCCEEDED


def test_a_decision_without_a_playbook_fails_clearly() -> None:
    plan = msgspec.structs.replace(MIGRATE, kind=DecisionKind.UNCORDON)
    step = advance(begun(plan), NOW)
    assert step.state is ActionState.FAILED


class Passes(tuple):
    """Commands, and how often they were gone through."""

    count = 0

    def __iter__(self):
        Passes.count += 1
        return super().__iter__()


@pytest.mark.parametrize("state", [UpdateState.ACKNOWLEDGED, UpdateState.REFUSED, UpdateState.SUCCEEDED])
def test_of_many_hosts_the_answers_are_gone_through_a_few_times_and_not_once_per_host(state: UpdateState) -> None:
    hosts = tuple(HostRanks(f"host-{n}", "10.0.0.1", f"host-{n}:7", (n,)) for n in range(100))
    names = tuple(host.host_id for host in hosts)
    spec = msgspec.structs.replace(SPEC, nnodes=100)
    restart = msgspec.structs.replace(
        MIGRATE, spec=spec, stop_hosts=names, next=msgspec.structs.replace(NEXT, hosts=hosts, peers={}), warm_hosts=()
    )
    progress = apply(begun(restart), advance(begun(restart), NOW))
    assert len(progress.commands) == 100
    progress = answer(progress, state, dict.fromkeys(names, CommandResult()))
    progress = msgspec.structs.replace(progress, commands=Passes(progress.commands))
    Passes.count = 0
    assert bool(advance(progress, NOW).commands) is (state is not UpdateState.ACKNOWLEDGED)
    assert may_start(progress) is (state is UpdateState.SUCCEEDED)
    assert Passes.count < 10


@pytest.mark.parametrize(("never", "lineage"), [(True, (LineageEntry(2),)), (True, ()), (False, (LineageEntry(2),))])
def test_a_job_that_goes_on_without_a_copy_begins_anew_unless_that_is_forbidden(
    never: bool, lineage: tuple[LineageEntry, ...]
) -> None:
    """What its hosts hold shows when they are told its history. An empty one is that of another run."""
    spec = msgspec.structs.replace(MIGRATE.spec, never_from_scratch=never)
    history = JobHistory(spec.checkpoint, lineage)
    plan = msgspec.structs.replace(MIGRATE, kind=DecisionKind.START_JOB, spec=spec, history=history, warm_hosts=())
    progress = apply(begun(plan), advance(begun(plan), NOW))
    step = advance(answer(progress, UpdateState.SUCCEEDED, {"a": CommandResult()}), NOW + 1)
    is_forbidden = never and bool(lineage)
    assert (step.state is ActionState.FAILED) == is_forbidden
    if is_forbidden:
        assert step.message == "No host has a copy of any step, and --never-from-scratch forbids starting over."
