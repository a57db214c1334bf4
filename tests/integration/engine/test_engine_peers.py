"""Replicas between real engines: sending, holding and fetching them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from support.clocks.waits import until
from support.hosts.engine_cluster import KEYRING, EngineCluster
from support.hosts.engines import EngineHost, Trainer
from support.jobs.placements import make_placement

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.contracts.peer_wire import (
    ListShards,
    PutShard,
    Reply,
    SavedSteps,
    ShardList,
    ShardVerdict,
    WorldStep,
)
from ckpt_engine.inspect.host_folder import read_host_folder
from ckpt_engine.peers.transport.handshake import introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.peers.transport.tcp import connect_tcp
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Replication, RestorePlan, Tier
from flyball.contracts.errors import FlyballError, Unauthorized
from flyball.contracts.on_host.segments import replica_segment
from services.controller.round.choices.peer_choice import choose_peers

FRAMES = 10_000
HAS_RDMA = any(Path("/sys/class/infiniband").glob("*"))


def call(host: EngineHost, *, caller: str = "b", job: str = "job", shared: bool = False) -> Connection:
    """A connection to an engine, as made by the engine of host `caller`; `shared`: with the key that all have."""
    connection = connect_tcp(host.address, settings=EngineSettings(), total=ByteCounters())
    keys = PeerKeys(host.token_file.read_text().strip().encode())
    if not shared:
        keys.learn(job, KEYRING.keys_of(caller, make_placement({caller: (0,), host.host_id: (1,)}, job=job)))
    named, token = keys.to_call(host.host_id, job)
    introduce(connection, identity=Identity(caller, "127.0.0.1:1", "1", named), token=token, timeout_s=60)
    return connection


def test_a_peer_lists_what_it_holds_of_the_requested_ranks(cluster: EngineCluster) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    for step in range(2):
        first.save(step)
        second.save(step)
    until(lambda: first.world_step == second.world_step == 1)
    with call(b, caller="a") as connection:
        held = connection.request(ListShards("job", 0), ShardList, timeout_s=60).copies
        assert [(copy.step, copy.tier, copy.host_id) for copy in held] == [(1, Tier.PEER, "b"), (0, Tier.PEER, "b")]
        own = connection.request(ListShards("job", 1), ShardList, timeout_s=60).copies
        assert {(copy.step, copy.rank, copy.tier) for copy in own} == {(0, 1, Tier.MEMORY), (1, 1, Tier.MEMORY)}
    with call(b, caller="a") as connection, pytest.raises(FlyballError):
        connection.request(ListShards("another", 0), ShardList, timeout_s=60)
    with pytest.raises(Unauthorized):
        call(b, caller="a", shared=True)
    digests = {copy.digest for copy in a.status.copies if (copy.rank, copy.step) == (0, 1)}
    assert digests == {held[0].digest}


@pytest.mark.skipif(HAS_RDMA, reason="this machine has RDMA")
def test_without_rdma_shards_go_over_tcp_and_the_status_says_why(cluster: EngineCluster) -> None:
    a, _ = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = [Trainer(cluster.hosts[name], rank) for rank, name in enumerate("ab")]
    for rank in ranks:
        rank.save(0)
    until(lambda: all(rank.world_step == 0 for rank in ranks))
    (shown,) = a.status.transports
    assert (shown.peer, shown.transport) == ("b", "tcp")
    assert shown.reason.startswith("a: ")
    assert read_host_folder(a.state_dir, str(a.shm_dir)).transports == (shown,)  # for `flyball ckpt ls`
    (logged,) = a.logged("peer_transport")
    assert logged["reason"] == shown.reason
    counters = a.status.counters
    assert counters["peer_bytes_sent"] > 1_000_000 and counters["peer_bytes_sent_rdma"] == 0


@pytest.mark.skipif(HAS_RDMA, reason="this machine has RDMA")
def test_required_rdma_that_is_not_there_sends_no_byte_and_says_why(cluster: EngineCluster) -> None:
    for name in "ab":
        cluster.host(name, TRANSPORT="rdma", **IMPATIENT)
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = [Trainer(cluster.hosts[name], rank) for rank, name in enumerate("ab")]
    for rank in ranks:
        rank.save(0)
    # One of the two gives up first, as with any peer that takes no replica. The other may learn that the step is lost
    # before its own time is up, and then it reports nothing.
    until(lambda: any(host.status.failures for host in cluster.hosts.values()))
    gave_up = next(host for host in cluster.hosts.values() if host.status.failures)
    (shown,) = gave_up.status.transports
    assert (shown.peer, shown.transport) == ("b" if gave_up.host_id == "a" else "a", "none")
    failure = gave_up.status.failures[0]
    assert failure.step == 0
    assert "transport = rdma" in failure.message and shown.reason in failure.message
    assert gave_up.status.counters["peer_bytes_sent"] == 0
    assert ranks[0].world_step == -1


def ready(cluster: EngineCluster, names: str, peers: Mapping[str, tuple[str, ...]], **settings: str) -> list[Trainer]:
    """One host and one rank per letter, two replicas each; generation 1 runs."""
    for name in names:
        cluster.host(name, **settings)
    placement = cluster.placement({name: (rank,) for rank, name in enumerate(names)}, peers=peers)
    assert all(reply.ok for reply in cluster.configure(placement, CheckpointSpec(replicas=2)).values())
    return [Trainer(cluster.hosts[name], rank) for rank, name in enumerate(names)]


RING = {"a": ("b", "c"), "b": ("c", "d"), "c": ("d", "a"), "d": ("a", "b")}
IMPATIENT = {"REPLICATE_TIMEOUT_S": "1.0"}


@pytest.mark.parametrize("mode", list(Replication))
def test_a_host_and_one_of_its_holders_are_lost_and_the_other_has_every_byte(
    cluster: EngineCluster, mode: Replication
) -> None:
    names = "abcd" if mode is Replication.RING else "abc"
    peers = choose_peers({name: f"rack-{name}" for name in names}, 2, mode)
    ranks = ready(cluster, names, peers)
    for step in range(2):
        for rank in ranks:
            rank.save(step)
    until(lambda: all(rank.world_step == 1 for rank in ranks))
    lost, left = peers["a"]
    dead = cluster.source(0, Tier.PEER, lost)
    for name in ("a", lost):
        cluster.hosts[name].lose()
    for name in ("x", "y"):
        cluster.host(name)
    new = {"a": "x", lost: "y"}
    lineage = (LineageEntry(1, 1), LineageEntry(2))
    gone = names.index(lost)
    holders = [name for name in peers[lost] if name != "a"]
    sources = {
        str(rank): (cluster.source(rank, Tier.MEMORY, name),)
        for rank, name in enumerate(names)
        if name not in ("a", lost)
    }
    sources["0"] = (dead, cluster.source(0, Tier.PEER, left))  # any copy will do
    sources[str(gone)] = (cluster.source(gone, Tier.PEER, holders[0]),)
    renamed = {new.get(n, n): tuple(new.get(holder, holder) for holder in held) for n, held in peers.items()}
    placement = cluster.placement(
        {new.get(name, name): (rank,) for rank, name in enumerate(names)},
        generation=2,
        peers=renamed,
        lineage=lineage,
        restore=RestorePlan(1, sources),
    )
    cluster.configure(placement, CheckpointSpec(replicas=2))
    for rank, name in ((0, "x"), (gone, "y")):
        moved = Trainer(cluster.hosts[name], rank, 2, lineage)
        assert moved.await_restore(2) is RestoreState.READY
        assert moved.stored(1, 1) == ranks[rank].payload(1)
        until(lambda name=name: cluster.hosts[name].status.restores)  # the trainer is informed first
        (report,) = cluster.hosts[name].status.restores
        assert report.source_tier is Tier.PEER and report.socket_bytes >= report.size_bytes > 1_000_000
        received = cluster.hosts[name].status.counters["peer_bytes_received"]
        assert received >= report.size_bytes  # through the socket, not from a file of this machine
    # Lost replicas are sent again at once, without a save: every rank has two on the remaining hosts.
    for rank, name in enumerate(names):
        for holder in renamed[new.get(name, name)]:
            until(lambda holder=holder, rank=rank: cluster.hosts[holder].holds(Tier.PEER, 1, rank))


def test_a_dead_peer_delays_neither_the_other_copy_nor_for_long_the_save(cluster: EngineCluster) -> None:
    ranks = ready(cluster, "abcd", RING, **IMPATIENT)
    a, b, c, d = (cluster.hosts[name] for name in "abcd")
    for rank in ranks:
        rank.save(0)
    until(lambda: all(rank.world_step == 0 for rank in ranks))
    os.kill(b.process.pid, signal.SIGSTOP)  # it keeps its connections, and never answers
    ranks[0].save(1)
    until(lambda: c.holds(Tier.PEER, 1, 0))
    b.kill()
    until(lambda: ranks[0].segments.control.replicated_step(1) == 1)  # with one replica, since one peer is unreachable
    until(lambda: a.status.counters.get("replicas_given_up", 0) >= 1)  # counted afterwards
    assert not any(failure.rank == 0 for failure in a.status.failures)
    b.start()
    until(lambda: b.holds(Tier.PEER, 1, 0))  # with two again once it is back
    assert d.status.ok


def test_a_peer_that_falls_silent_in_the_middle_of_an_exchange_is_not_waited_for(cluster: EngineCluster) -> None:
    # Longer in total than a delayed peer stays silent: only this peer may be given up.
    quick = {name: "5.0" for name in ("REPLICATE_TIMEOUT_S", "IO_TIMEOUT_S", "HANDSHAKE_TIMEOUT_S", "PING_TIMEOUT_S")}
    ranks = ready(cluster, "abcd", RING, **quick)
    for rank in ranks:
        rank.save(0)
    until(lambda: all(rank.world_step == 0 for rank in ranks))
    silent = cluster.hosts["b"].process.pid
    os.kill(silent, signal.SIGSTOP)  # no FIN, no RST: a reply to an offer could take allocate_timeout_s, a minute
    try:
        ranks[0].save(1)
        until(lambda: ranks[0].segments.control.replicated_step(1) == 1)
    finally:
        os.kill(silent, signal.SIGCONT)
    until(lambda: cluster.hosts["b"].holds(Tier.PEER, 1, 0))


def test_chunks_that_did_not_change_do_not_travel_again(cluster: EngineCluster) -> None:
    class Frozen(Trainer):  # type: ignore[misc,valid-type]  # the fixture's class
        """Two of 24 MiB change from step to step."""

        def payload(self, step: int, count: int = 0) -> bytes:
            frozen = np.random.default_rng(self.rank).random(22 << 18, dtype=np.float32)
            trained = np.random.default_rng([step, self.rank]).random(2 << 18, dtype=np.float32)
            return save({"a.frozen": frozen, "b.trained": trained}, {"step": str(step)})

    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Frozen(a, 0), Frozen(b, 1)
    sent: list[int] = []
    for step in range(4):
        before = a.status.counters["peer_bytes_sent"]
        first.save(step)
        second.save(step)
        until(lambda step=step: first.world_step == second.world_step == step)
        sent.append(a.status.counters["peer_bytes_sent"] - before)
    assert sent[0] > 24 << 20
    assert all(count < 5 << 20 for count in sent[1:])  # the header's chunk, the changed ones, the manifest
    assert a.status.counters["replica_bytes_unchanged"] > 3 * 20 << 20
    replica = RankSegments.open(replica_segment(b.prefix, "job", 0))
    for step in (2, 3):
        view = replica.find(1, step)
        assert view is not None and bytes(replica.payload(view.index)) == first.payload(step)
    view = replica.find(1, 3)
    assert view is not None
    replica.payload(view.index)[10 << 20] ^= 1  # the copy here is bad: this is detected, and it is fetched
    first.save(4)
    second.save(4)
    until(lambda: first.world_step == second.world_step == 4)
    view = replica.find(1, 4)
    assert view is not None and bytes(replica.payload(view.index)) == first.payload(4)
    first.save(5)
    second.save(5)
    until(lambda: first.world_step == second.world_step == 5)
    view = replica.find(1, 5)
    assert view is not None and bytes(replica.payload(view.index)) == first.payload(5)
    assert a.status.counters.get("saves_failed", 0) == 0


def test_a_bandwidth_limit_holds_and_a_newer_generation_does_not_wait_for_it(cluster: EngineCluster) -> None:
    a, b = cluster.host("a", PEER_BYTES_PER_S="10000"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: a.status.counters["peer_bytes_sent"] > 10_000)
    assert not b.holds(Tier.PEER, 0, 0)  # 1.2 MB would take two minutes
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}, generation=2))
    again = [Trainer(a, 0, 2), Trainer(b, 1, 2)]
    assert all(rank.try_save(0) for rank in again)
    sent = a.status.counters["peer_bytes_sent"]
    until(lambda: a.status.counters["peer_bytes_sent"] > sent)  # the old transfer has made room for the new one
    assert not b.holds(Tier.PEER, 0, 0)


def test_a_sender_that_dies_in_mid_shard_leaves_the_older_replica_and_sends_again(cluster: EngineCluster) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    for rank in (first, second):
        rank.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    a.kill()
    a.start(FLYBALL_CKPT_PEER_BYTES_PER_S="10000")
    for rank in (first, second):
        rank.save(1)
    until(lambda: a.status.counters["peer_bytes_sent"] > 10_000)
    a.kill()
    until(lambda: b.logged("connection_ended") or b.logged("connection_bytes"))
    assert b.holds(Tier.PEER, 0, 0) and not b.holds(Tier.PEER, 1, 0)
    a.start()
    until(lambda: first.world_step == second.world_step == 1)
    replica = RankSegments.open(replica_segment(b.prefix, "job", 0))
    view = replica.find(1, 1)
    assert view is not None and bytes(replica.payload(view.index)) == first.payload(1)


def test_what_a_foreign_host_says_changes_no_save(cluster: EngineCluster) -> None:
    """It was placed in a job with the same two hosts, and knows all names and numbers of the other job."""
    a, b, c = (cluster.host(name) for name in "abc")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = [Trainer(a, 0), Trainer(b, 1)]
    assert c.address
    done = threading.Event()
    sent = 0

    def attack() -> None:
        nonlocal sent
        lies = [
            (b, WorldStep("job", 1, 10**6, tuple(range(16)), abandoned_upto=10**6, next_save=10**6, pace=60)),
            (a, SavedSteps("job", 1, 1, (), tuple(range(200)), saving=10**6)),
            (a, SavedSteps("job", 1, 0, (), tuple(range(200)))),
            (b, PutShard("job", 1, 1, 50, 0, 100, 1_000_000)),
        ]
        links = {host.host_id: call(host, caller="c", job="other") for host in (a, b)}
        while not done.is_set():
            for host, lie in lies:
                try:
                    verdict = links[host.host_id].request(lie, Reply, timeout_s=60).verdict
                except FlyballError:  # it closes a connection that is for another job
                    links[host.host_id].close()
                    links[host.host_id] = call(host, caller="c", job="other")
                else:
                    assert verdict is ShardVerdict.FOREIGN
                sent += 1
        for link in links.values():
            link.close()

    with ThreadPoolExecutor(1) as threads:
        attacking = threads.submit(attack)
        try:
            until(lambda: sent > 0 or attacking.done())
            for step in range(40):
                for rank in ranks:
                    rank.save(step)
                until(lambda step=step: [rank.world_step for rank in ranks] == [step, step], f"step {step}")
            until(lambda: sent >= FRAMES or attacking.done())
        finally:
            done.set()
        attacking.result()
    assert not a.status.failures and not b.status.failures
    assert a.status.counters["frames_of_foreign_hosts"] + b.status.counters["frames_of_foreign_hosts"] == sent
    assert [copy.step for copy in b.status.copies if copy.tier is Tier.PEER] == [38, 39]
