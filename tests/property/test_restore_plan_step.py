"""The plan of a restore: every copy is used or refused with a reason, as the controller would choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.format.manifest import Manifest
from ckpt_engine.rules.restore_planner import Bandwidths, StepPlan, WantedWorld, plan_step
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier, is_alive
from flyball.contracts.cluster import HostRanks
from flyball.contracts.recovery import NotUsable, Origin
from services.rules.recovery_point import plan_restore

HOSTS = ("a", "b", "c")
STEP = 5


def copy_of(rank: int, tier: Tier, host_id: str, *, generation: int = 1, size_bytes: int = 10**9) -> ShardCopy:
    return ShardCopy("job", generation, STEP, rank, tier, host_id, size_bytes, f"{generation}-{rank}")


copies = st.lists(
    st.builds(
        copy_of,
        st.integers(0, 2),
        st.sampled_from((Tier.MEMORY, Tier.PEER, Tier.DISK)),
        st.sampled_from(HOSTS),
        generation=st.integers(1, 2),
    )
    | st.builds(copy_of, st.integers(0, 2), st.just(Tier.PERSISTENT), st.just(""), generation=st.integers(1, 2)),
    max_size=20,
)
lineages = st.sampled_from(((LineageEntry(1),), (LineageEntry(1, 4), LineageEntry(2)), (LineageEntry(2),)))


@given(copies, lineages, st.sets(st.sampled_from(HOSTS)), st.sets(st.sampled_from(HOSTS)), st.booleans())
def test_every_copy_is_a_source_or_refused_for_a_reason_that_is_true(
    found: list[ShardCopy],
    lineage: tuple[LineageEntry, ...],
    lost: set[str],
    askable: set[str],
    is_sealed: bool,
) -> None:
    home = {0: "a", 1: "b", 2: "c"}
    plan = plan_step(
        STEP,
        found,
        WantedWorld(3, home),
        lineage=lineage,
        lost_hosts=lost,
        engine_addresses={host: f"{host}:1" for host in askable},
        sealed={(1, STEP), (2, STEP)} if is_sealed else (),
    )
    assert [shard.rank for shard in plan.shards] == [0, 1, 2]
    for shard in plan.shards:
        listed = [s.copy for s in shard.sources] + [u.copy for u in shard.unusable]
        assert sorted(listed) == sorted({copy for copy in found if copy.rank == shard.rank})
        assert (shard.reason is None) == bool(shard.sources)
        assert (shard.reason is NotUsable.NO_COPY) == (not listed)
        assert [s.origin for s in shard.sources] == sorted(s.origin for s in shard.sources)
        for source in shard.sources:
            copy = source.copy
            assert copy.generation == plan.generation and is_alive(copy.generation, STEP, lineage)
            assert is_sealed if copy.tier is Tier.PERSISTENT else copy.host_id not in lost
            assert copy.tier is Tier.PERSISTENT or copy.host_id == shard.home or copy.host_id in askable
        for refused in shard.unusable:
            copy = refused.copy
            assert {
                NotUsable.DEAD_LINEAGE: not is_alive(copy.generation, STEP, lineage),
                NotUsable.LOST_HOST: copy.host_id in lost,
                NotUsable.UNREACHABLE: copy.host_id not in askable,
                NotUsable.NOT_SEALED: not is_sealed and copy.tier is Tier.PERSISTENT,
                NotUsable.OTHER_GENERATION: copy.generation != plan.generation,
            }[refused.reason]
    assert (plan.seconds > 0) == plan.is_restorable


@given(copies, lineages, st.sets(st.sampled_from(HOSTS)))
def test_it_agrees_with_the_controllers_choice(
    found: list[ShardCopy], lineage: tuple[LineageEntry, ...], askable: set[str]
) -> None:
    hosts = [HostRanks(host, "ip", "", (rank,)) for rank, host in enumerate(HOSTS)]
    addresses = {host: f"{host}:1" for host in askable}
    chosen = plan_restore(found, lineage, 3, addresses, hosts)
    layout = WantedWorld(3, {rank: host for host in hosts for rank, host in ((host.ranks[0], host.host_id),)})
    plan = plan_step(STEP, found, layout, lineage=lineage, engine_addresses=addresses)
    assert plan.is_restorable == (chosen is not None)
    if chosen is not None:
        for shard in plan.shards:
            mine = [(s.copy.generation, s.copy.tier, s.copy.host_id) for s in shard.sources]
            assert mine == [(s.generation, s.tier, s.host_id) for s in chosen.sources[str(shard.rank)]]


def test_a_lost_hosts_ranks_are_served_from_afar_and_share_the_way() -> None:
    found = [
        copy_of(0, Tier.MEMORY, "a"),
        copy_of(0, Tier.PEER, "b"),
        copy_of(1, Tier.MEMORY, "a"),
        copy_of(1, Tier.PEER, "b"),
        copy_of(2, Tier.MEMORY, "b"),
    ]
    layout = WantedWorld(3, {0: "a", 1: "a", 2: "b"})
    rates = Bandwidths(local_memory=10e9, remote_memory=1e9)
    plan = plan_step(STEP, found, layout, lost_hosts={"a"}, bandwidths=rates)
    assert [[s.origin for s in shard.sources] for shard in plan.shards] == [
        [Origin.REMOTE_MEMORY],
        [Origin.REMOTE_MEMORY],
        [Origin.LOCAL_SLOT],
    ]
    assert plan.shards[0].sources[0].seconds == pytest.approx(1.0)
    assert plan.seconds == pytest.approx(2.0)  # b sends both
    assert plan.shards[0].unusable[0].reason is NotUsable.LOST_HOST


def unrestorable(plan: StepPlan, rank: int) -> NotUsable | None:
    assert not plan.is_restorable and plan.seconds == 0.0
    return plan.shards[rank].reason


def test_why_a_step_cannot_be_restored() -> None:
    here = WantedWorld(2, {0: "a", 1: "b"})
    first, second = copy_of(0, Tier.DISK, "a"), copy_of(1, Tier.DISK, "b")
    assert unrestorable(plan_step(STEP, [first], here), 1) is NotUsable.NO_COPY
    assert unrestorable(plan_step(STEP, [first, second], here, lost_hosts=["b"]), 1) is NotUsable.LOST_HOST
    elsewhere = [first, copy_of(1, Tier.DISK, "c")]
    assert unrestorable(plan_step(STEP, elsewhere, here, engine_addresses={}), 1) is NotUsable.UNREACHABLE
    branched_off = (LineageEntry(1, STEP - 1), LineageEntry(2))
    assert unrestorable(plan_step(STEP, [first, second], here, lineage=branched_off), 0) is NotUsable.DEAD_LINEAGE
    mixed = [first, copy_of(1, Tier.DISK, "b", generation=2)]
    assert unrestorable(plan_step(STEP, mixed, here), 0) is NotUsable.OTHER_GENERATION
    stored = [copy_of(rank, Tier.PERSISTENT, "") for rank in (0, 1)]
    assert unrestorable(plan_step(STEP, stored, here, sealed=()), 0) is NotUsable.NOT_SEALED


def test_a_world_of_another_size_is_refused_where_manifests_tell() -> None:
    manifest = Manifest(1, "v", "job", 1, STEP, 0, 4, 0, 1, b"", ())
    plan = plan_step(STEP, [copy_of(0, Tier.DISK, "a")], WantedWorld(1, {0: "a"}), manifests={"1-0": manifest})
    assert unrestorable(plan, 0) is NotUsable.OTHER_WORLD_SIZE


def test_a_step_of_another_world_is_planned_if_the_history_says_so() -> None:
    found = [copy_of(rank, Tier.MEMORY, "ab"[rank // 2]) for rank in range(4)]
    manifest = Manifest(1, "v", "job", 1, STEP, 0, 4, 0, 1, b"", ())
    here = WantedWorld(2, {0: "a", 1: "b"})
    grown = (LineageEntry(1, STEP, world_size=4), LineageEntry(2, world_size=2))
    plan = plan_step(STEP, found, here, lineage=grown, manifests={"1-0": manifest})
    assert plan.is_restorable
    assert [(shard.rank, shard.home) for shard in plan.shards] == [(rank, "") for rank in range(4)]
    assert {source.origin for shard in plan.shards for source in shard.sources} == {Origin.REMOTE_MEMORY}
    assert unrestorable(plan_step(STEP, found[:2], here, lineage=grown), 3) is NotUsable.NO_COPY
    assert plan_step(STEP, found[:2], here).is_restorable, "without a history they are what two ranks saved"
