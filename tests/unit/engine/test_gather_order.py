"""In which order an engine tries the sources of a shard of which its host needs a part."""

from __future__ import annotations

from support.jobs.placements import make_placement

from ckpt_engine.rules.fetch_order import gather_order
from flyball.contracts.checkpoints import LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import Placement
from flyball.contracts.recovery import Origin

SOURCES = (
    ShardSource(1, 1, Tier.MEMORY, "b", "b:1"),
    ShardSource(1, 1, Tier.PEER, "c", "c:1"),
    ShardSource(1, 1, Tier.DISK, "a", ""),
    ShardSource(1, 1, Tier.DISK, "b", "b:1"),
    ShardSource(1, 1, Tier.PERSISTENT, "", ""),
)


def placement(saved_by: int, plan: RestorePlan) -> Placement:
    return make_placement(
        {"a": (0,), "b": (1,), "c": ()},
        generation=2,
        lineage=(LineageEntry(1, 3, world_size=saved_by), LineageEntry(2, world_size=2)),
        restore=plan,
    )


def order(plan: RestorePlan, saved_by: int, *in_memory: Tier) -> list[tuple[Origin, str]]:
    steps = gather_order(plan, 1, placement=placement(saved_by, plan), host_id="a", in_memory=in_memory)
    return [(step.origin, step.source.host_id) for step in steps]


def test_what_the_trainers_can_read_themselves_comes_first() -> None:
    remote = [(Origin.REMOTE_MEMORY, "b"), (Origin.REMOTE_MEMORY, "c"), (Origin.REMOTE_DISK, "b")]
    rest = [(Origin.LOCAL_DISK, "a"), *remote, (Origin.PERSISTENT, "")]
    plan = RestorePlan(3, {"1": SOURCES})
    assert order(plan, 4) == rest
    memory = [(Origin.LOCAL_SLOT, "a"), (Origin.LOCAL_REPLICA, "a")]
    assert order(plan, 4, Tier.PEER, Tier.MEMORY) == [*memory, *rest]


def test_a_plan_for_another_world_has_all_sources() -> None:
    assert order(RestorePlan(3, {"0": (ShardSource(0, 1, Tier.MEMORY, "a", "a:1"),)}), 4) == []


def test_without_sources_of_other_hosts_all_that_are_known_are_asked() -> None:
    found = order(RestorePlan(3, {"0": (ShardSource(0, 1, Tier.MEMORY, "a", ""),)}), 2)
    asked = [(Origin.REMOTE_MEMORY, "b"), (Origin.REMOTE_MEMORY, "c")]  # b runs the rank
    assert found == [(Origin.LOCAL_DISK, "a"), *asked, (Origin.PERSISTENT, "")]
