"""An engine that restarts with empty memory gets its shards back before anyone asks, and so do its peers."""

from __future__ import annotations

import contextlib

from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.fault_points import VARIABLE
from flyball.contracts.on_host.segments import replica_segment


def saved(cluster: EngineCluster) -> list[Trainer]:
    """Two ranks on two hosts, with steps 1 to 3 in memory and as replicas on each other."""
    hosts = [cluster.hosts["a"], cluster.hosts["b"]]
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for step in (1, 2, 3):
        for rank in ranks:
            rank.save(step)
    until(lambda: all(rank.world_step == 3 for rank in ranks))
    return ranks


def empty(host: EngineHost) -> None:
    """As after a reboot: the state folder is there, shared memory is empty."""
    host.kill()
    for path in host.segments():
        path.unlink()


def test_memory_is_filled_again_from_the_peers_and_the_world_knows_its_step(cluster: EngineCluster) -> None:
    a = cluster.host("a")
    b = cluster.host("b")
    ranks = saved(cluster)
    empty(a)  # the coordinator's: it has lost the world step too
    a.start()
    until(lambda: a.holds(Tier.MEMORY, 3, 0) and a.holds(Tier.PEER, 3, 1))
    again = Trainer(a, 0, generation=2)  # only to look
    assert again.stored(1, 3) == ranks[0].payload(3)
    until(lambda: again.stored(1, 2) == ranks[0].payload(2))  # the newest comes first
    until(lambda: again.world_step == 3)
    until(lambda: a.status.counters.get("shards_refilled") == 2)
    assert b.holds(Tier.PEER, 3, 0)


def test_a_replica_that_is_bad_does_not_keep_the_next_holders_away(cluster: EngineCluster) -> None:
    hosts = [cluster.host(name) for name in "abc"]
    peers = {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}
    placement = cluster.placement({"a": (0,), "b": (1,), "c": (2,)}, peers=peers)
    cluster.configure(placement, CheckpointSpec(replicas=2))
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.save(1)
    until(lambda: all(rank.world_step == 1 for rank in ranks) and all(h.holds(Tier.PEER, 1, 0) for h in hosts[1:]))
    empty(hosts[0])
    replica = RankSegments.open(replica_segment(hosts[1].prefix, "job", 0))
    view = replica.find(1, 1)
    assert view is not None
    replica.payload(view.index)[-1] ^= 1
    hosts[0].start()
    until(lambda: hosts[0].holds(Tier.MEMORY, 1, 0))
    assert Trainer(hosts[0], 0, generation=2).stored(1, 1) == ranks[0].payload(1)


def test_an_engine_with_refill_off_stays_empty(cluster: EngineCluster) -> None:
    a = cluster.host("a", REFILL="false")
    cluster.host("b")
    saved(cluster)
    empty(a)
    a.start()
    until(lambda: a.holds(Tier.PEER, 3, 1))  # replicas of others arrive all the same
    assert not [copy for copy in a.status.copies if copy.tier is Tier.MEMORY]
    assert "shards_refilled" not in a.status.counters


def test_killed_in_the_middle_of_it_the_next_engine_does_it(cluster: EngineCluster) -> None:
    a = cluster.host("a")
    cluster.host("b")
    saved(cluster)
    empty(a)
    with contextlib.suppress(AssertionError):  # killed before it could reply
        a.start(**{VARIABLE: "engine.refill:2"})
    until(lambda: a.process is not None and a.process.poll() is not None)
    a.start()
    until(lambda: a.holds(Tier.MEMORY, 3, 0) and a.holds(Tier.PEER, 3, 1))


def test_a_trainer_at_work_keeps_its_slots_to_itself(cluster: EngineCluster) -> None:
    """It restored from a file, say, and has not saved since: two writers in one slot would tear a step."""
    a = cluster.host("a")
    cluster.host("b")
    rank, _ = saved(cluster)
    a.kill()
    for view in rank.segments.slots():
        rank.segments.drop(view.index)
    a.start()
    until(lambda: a.holds(Tier.PEER, 3, 1))
    assert rank.try_save(4)
    until(lambda: a.holds(Tier.MEMORY, 4, 0))
    assert "shards_refilled" not in a.status.counters
