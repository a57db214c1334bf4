"""A host's part of a placement tells its engine and its daemon the same as the whole."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.contracts import peer_plan as peers
from ckpt_engine.rules.fetch_order import fetch_order
from flyball.contracts import wire
from flyball.contracts.checkpoints import LineageEntry, Replication, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, Placement
from services.actuator.rules.host_parts import host_parts
from services.controller.round.choices.peer_choice import choose_peers


def placement_of(nnodes: int, per_node: int, replicas: int, replication: Replication, has_restore: bool) -> Placement:
    hosts = tuple(
        HostRanks(f"h{n}", f"10.0.0.{n}", f"10.0.0.{n}:7", tuple(range(n * per_node, (n + 1) * per_node)))
        for n in range(nnodes)
    )
    source = {h.host_id: ShardSource(0, 1, Tier.PEER, h.host_id, h.engine_address) for h in hosts}
    sources = {str(rank): tuple(source.values())[:3] for h in hosts for rank in h.ranks}
    return Placement(
        job="train",
        generation=2,
        world_size=nnodes * per_node,
        hosts=hosts,
        master_address="10.0.0.0",
        master_port=4000,
        peers=choose_peers({h.host_id: f"rack{n % 3}" for n, h in enumerate(hosts)}, replicas, replication),
        lineage=(LineageEntry(1, 5), LineageEntry(2)),
        restore=RestorePlan(5, sources) if has_restore else None,
    )


@given(
    st.builds(
        placement_of,
        nnodes=st.integers(1, 9),
        per_node=st.integers(1, 3),
        replicas=st.integers(0, 3),
        replication=st.sampled_from(Replication),
        has_restore=st.booleans(),
    )
)
def test_a_part_says_the_same_of_its_host_as_the_whole(placement: Placement) -> None:
    parts = host_parts(placement)
    assert list(parts) == [host.host_id for host in placement.hosts]
    for host_id, part in parts.items():
        assert part.host(host_id) == placement.host(host_id)
        assert peers.coordinator_host(part) == peers.coordinator_host(placement)
        assert peers.replica_hosts(part, host_id) == peers.replica_hosts(placement, host_id)
        assert peers.replicated_ranks(part, host_id) == peers.replicated_ranks(placement, host_id)
        linked = peers.linked_hosts(placement, host_id)
        assert peers.linked_hosts(part, host_id) == linked
        whole = peers.engine_addresses(placement)
        assert {h: a for h, a in peers.engine_addresses(part).items() if h in linked} == {h: whole[h] for h in linked}
        if placement.restore is not None and part.restore is not None:
            for rank in {*part.host(host_id).ranks, *peers.replicated_ranks(placement, host_id)}:
                assert fetch_order(part.restore, rank, host_id=host_id) == fetch_order(
                    placement.restore, rank, host_id=host_id
                )


def test_all_but_the_coordinators_part_stay_small_in_a_large_world() -> None:
    whole = placement_of(1000, 8, 1, Replication.RING, has_restore=True)
    sizes = sorted(len(wire.encode(part)) for part in host_parts(whole).values())
    assert sizes[-2] < 8_000
    assert len(wire.encode(whole)) > 100 * sizes[-2]


def test_of_another_worlds_step_every_host_gets_all_sources() -> None:
    """Any of them may need bytes of any shard."""
    placement = placement_of(4, 2, 1, Replication.RING, has_restore=True)
    shrunk = msgspec.structs.replace(placement, lineage=(LineageEntry(1, 5, world_size=9), LineageEntry(2)))
    for part in host_parts(shrunk).values():
        assert part.restore == shrunk.restore
