"""Whatever hosts answer, in whatever order and however often: one start per generation, and an end."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy.checked import advance

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Command,
    CommandResult,
    CommandUpdate,
    DecisionKind,
    GenerationPlan,
    HostCheckPlan,
    HostToCheck,
    RankPosition,
    StartWorkers,
    UpdateState,
)
from flyball.contracts.identity import Fence
from services.actuator.ports import ActionProgress, OutboxCommand
from services.actuator.rules.host_parts import host_parts
from services.actuator.rules.playbook import LIST, PHASES, START, STOP, may_start

SPEC = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1)
NEXT = GenerationPlan(
    job="job",
    generation=3,
    parent=2,
    hosts=(HostRanks("a", "10.0.0.1", "a:7", (0,)), HostRanks("c", "10.0.0.3", "c:7", (1,))),
    peers={},
    parent_lineage=(LineageEntry(2),),
    restart_count=1,
)
CHECK = HostCheckPlan(tuple(HostToCheck(name, "10.0.0.1", 7) for name in "ab"), timeout_s=15.0, stops=True)
STARTS = (DecisionKind.START_JOB, DecisionKind.RESTART_IN_PLACE, DecisionKind.MIGRATE_TO_SPARE)

kinds = st.sampled_from(sorted(PHASES))
DURABLE = msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(disk_dir="/disk", disk_every_steps=10))

answers = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(list(UpdateState)),
        st.sampled_from(["", "too_late", "stale_command"]),
        st.integers(-1, 200),
        st.sampled_from([0.0, 0.1, 1.0, 20.0]),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(kinds, answers, st.booleans())
def test_one_start_and_always_an_end(
    kind: DecisionKind, script: list[tuple[str, UpdateState, str, int, float, bool]], durable: bool
) -> None:
    plan = ActionPlan(
        kind,
        "job",
        DURABLE if durable else SPEC,
        generation=2,
        stop_hosts=() if kind is DecisionKind.START_JOB else ("a", "b"),
        next=NEXT if kind in STARTS else None,
        emergency_step=60,
        deadline_s=60.0,
        warm_hosts=("c",),
        check=CHECK if kind is DecisionKind.CHECK_HOSTS else None,
    )
    now = 1000.0
    progress = ActionProgress("act-1", "dec-1", "inc-1", plan, ActionState.QUEUED, "", 0, now, ())
    placements = []
    phases: list[str] = []

    def move() -> None:
        nonlocal progress
        for _ in range(10):
            step = advance(progress, now)
            assert step == advance(progress, now)
            if step.phase == START != progress.phase:
                assert may_start(progress)  # else it would not have known where copies are
            known = {r.command.command_id for r in progress.commands}
            assert not known & {d.command_id for d in step.commands}
            assert len({d.command_id for d in step.commands}) == len(step.commands)
            if step.placement is not None:
                placements.append(step.placement)
            if step.phase not in phases[-1:]:
                phases.append(step.phase)
            fresh = tuple(
                OutboxCommand(
                    Command(d.command_id, "act-1", d.host_id, Fence(1, 2), d.body, d.deadline_s), step.phase, now, None
                )
                for d in step.commands
            )
            is_empty = not fresh and (step.phase, step.state) == (progress.phase, progress.state)
            progress = msgspec.structs.replace(
                progress,
                phase=step.phase,
                state=step.state,
                attempt=step.attempt,
                commands=(*progress.commands, *fresh),
            )
            if is_empty:
                return
        raise AssertionError("the playbook moves without end")

    def hear(host: str, state: UpdateState, code: str, position: int, late: bool) -> None:
        """One answer to the host's newest command (or its oldest: a late one); final answers stand, as in the store."""
        nonlocal progress
        records = list(progress.commands)
        mine = [i for i, r in enumerate(records) if r.command.host_id == host]
        if not mine:
            return
        at = mine[0] if late else mine[-1]
        before = records[at].update
        if before is not None and before.state is not UpdateState.ACKNOWLEDGED:
            return
        result = CommandResult(
            positions=(RankPosition(0, position),) if position >= 0 else (),
            copies=tuple(ShardCopy("job", 2, 9, rank, Tier.MEMORY, host, 1, "d") for rank in (0, 1)),
            free_port=1234,
        )
        update = CommandUpdate(records[at].command.command_id, host, "i", state, now, code=code, result=result)
        records[at] = msgspec.structs.replace(records[at], update=update)
        progress = msgspec.structs.replace(progress, commands=tuple(records))

    move()
    for host, state, code, position, wait_s, late in script:
        now += wait_s
        hear(host, state, code, position, late)
        move()
    now = 1060.0
    move()
    assert progress.state.ended
    assert len(placements) <= 1
    assert [phase for phase in phases if phase != LIST] == [phase for phase in PHASES[kind] if phase in phases]
    if LIST in phases:
        listed = phases.index(LIST)
        assert phases[:listed] in ([], [STOP]) and phases[listed + 1 :] in ([], [START])
    starts = {r.command.host_id: r.command.body for r in progress.commands if isinstance(r.command.body, StartWorkers)}
    assert bool(starts) == bool(placements)
    if placements:
        assert {host: body.placement for host, body in starts.items()} == host_parts(placements[0])
    if progress.state is ActionState.SUCCEEDED and kind in STARTS:
        assert len(placements) == 1
    assert len(progress.commands) <= 40
