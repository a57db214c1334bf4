"""Engines as processes: commit, replicate, agree, die, restart, and serve their shards to a spare."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import KEYRING, EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.contracts.notices import SaveAborted, SaveWaited
from ckpt_engine.rules.coordinator import MAX_ABANDONED
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Arm, AwaitSaved, Configure, Flush, GetStatus, Release
from flyball.contracts.on_host.segments import replica_segment
from flyball.contracts.reports.testimony import Testimonies
from services.rules.engine_keys import EngineKeyring

Pair = tuple[EngineHost, EngineHost, Trainer, Trainer]


@pytest.fixture
def pair(cluster: EngineCluster) -> Pair:
    """Hosts a and b, one rank each, each the other's peer; generation 1 runs."""
    a, b = cluster.host("a"), cluster.host("b")
    replies = cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    assert all(reply.ok for reply in replies.values()), replies
    return a, b, Trainer(a, 0), Trainer(b, 1)


def test_a_captured_shard_is_committed_replicated_and_becomes_the_world_step(pair: Pair) -> None:
    a, b, first, second = pair
    for step in range(5):
        first.save(step)
        second.save(step)
    until(lambda: first.world_step == 4 and second.world_step == 4)
    assert a.holds(Tier.MEMORY, 4, 0) and a.holds(Tier.PEER, 4, 1)
    assert b.holds(Tier.MEMORY, 4, 1) and b.holds(Tier.PEER, 4, 0)
    replica = RankSegments.open(replica_segment(b.prefix, "job", 0))
    view = replica.find(1, 4)
    assert view is not None
    assert bytes(replica.payload(view.index)) == first.payload(4)
    until(lambda: first.segments.control.replicated_step(1) == 4)


def test_hosts_placed_before_their_engines_were_up_are_linked_once_the_supervisor_says_where_they_are(
    cluster: EngineCluster,
) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    placement = cluster.placement({"a": (0,), "b": (1,)})
    early = msgspec.structs.replace(
        placement, hosts=tuple(msgspec.structs.replace(host, engine_address="") for host in placement.hosts)
    )
    cluster.configure(early)
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: (a.status.unreachable_peers, b.status.unreachable_peers) == (("b",), ("a",)))
    assert first.world_step == -1
    assert a.status.generations == {"job": 1}
    a.ask(GetStatus(addresses={"b": b.address, "nobody": "nowhere"}))
    until(lambda: first.world_step == second.world_step == 0)
    assert a.holds(Tier.PEER, 0, 1) and b.holds(Tier.PEER, 0, 0)


def test_a_rank_never_overwrites_what_the_world_still_needs(pair: Pair) -> None:
    _, _, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == 0)
    first.save(1)
    assert not first.try_save(2)  # the other rank has only step 0
    second.save(1)
    first.save(2)


def test_a_step_that_one_rank_failed_to_save_is_abandoned_and_the_world_goes_on(pair: Pair) -> None:
    _, b, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    first.save(1)
    second.notify(SaveAborted("job", 1, 1, 1, "no room"))
    first.save(2)  # waits until it is abandoned
    second.save(2)
    until(lambda: first.world_step == second.world_step == 2)
    failures = b.status.failures
    assert [(f.rank, f.step, f.message) for f in failures] == [(1, 1, "no room")]


def test_a_step_that_one_rank_went_past_without_a_word_is_abandoned(pair: Pair) -> None:
    _, _, first, second = pair
    for step in (0, 1):
        first.save(step)
    second.save(0)
    until(lambda: second.world_step == 0)
    second.save(2)
    first.save(2)
    until(lambda: first.world_step == second.world_step == 2)


def test_a_host_that_was_away_while_more_steps_were_abandoned_than_have_names_goes_on(pair: Pair) -> None:
    _, b, first, second = pair
    for rank in (first, second):
        rank.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    second.save(1)
    b.kill()
    for step in range(1, 21):
        first.notify(SaveAborted("job", 0, 1, step, "no room"))
    until(lambda: len(first.segments.read_world().abandoned.named) == MAX_ABANDONED)
    b.start()
    for rank in (second, first):  # the second waits until step 1 is abandoned for it
        rank.save(30)
    until(lambda: first.world_step == second.world_step == 30)


def test_a_failure_that_a_killed_engine_never_reported_keeps_no_replica_slot(cluster: EngineCluster) -> None:
    a, b = cluster.host("a"), cluster.host("b", start=False).start(FLYBALL_FAULT_POINT="engine.replicated:2")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    for rank in (first, second):
        rank.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    second.save(1)
    until(lambda: b.process is not None and b.process.poll() is not None)
    assert a.holds(Tier.PEER, 1, 1)
    view = second.segments.find(1, 1)
    assert view is not None
    second.segments.control.drop(view.index)  # as if found bad
    b.start()
    for rank in (first, second):
        rank.save(2)
    until(lambda: first.world_step == second.world_step == 2)
    assert b.status.failures == ()


def test_an_engine_killed_with_a_captured_slot_commits_it_when_it_is_back(pair: Pair) -> None:
    a, b, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    for host in (a, b):
        address = host.address
        host.kill()
        first.save(1) if host is a else second.save(1)
        host.start()
        assert host.address == address
    until(lambda: first.world_step == second.world_step == 1)
    first.save(2)
    second.save(2)
    until(lambda: first.world_step == second.world_step == 2)


def test_a_killed_peer_is_seen_at_once_without_traffic_and_seen_again_when_back(cluster: EngineCluster) -> None:
    a, b = cluster.host("a", PING_TIMEOUT_S="1000"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    until(lambda: a.logged("peer_connected"))
    assert a.status.unreachable_peers == ()
    assert b.ask(GetStatus()).ok  # as its daemon does

    def testimonies() -> Testimonies:
        return a.ask(GetStatus(about=("b", "unheard-of"))).testimonies

    until(lambda: [t.peer for t in testimonies() if t.daemon_s is not None] == ["b"])
    until(lambda: testimonies()[0].engine_s < 5.0)
    b.kill()
    until(lambda: a.status.unreachable_peers == ("b",))  # by event: a missed ping would take a thousand seconds
    assert testimonies() == ()
    b.start()
    until(lambda: a.status.unreachable_peers == ())


def test_a_lost_host_is_restored_on_a_spare_from_the_peers_memory(pair: Pair, cluster: EngineCluster) -> None:
    a, b, first, second = pair
    for step in range(3):
        first.save(step)
        second.save(step)
    until(lambda: first.world_step == second.world_step == 2)
    second.save(3)  # only b has it: dead after the branch at 2
    sent_before = b.status.counters["peer_bytes_sent"]
    expected = first.payload(2)
    a.lose()
    assert b.ask(Flush("job", 60.0)).ok
    c = cluster.host("c")
    lineage = (LineageEntry(1, 2), LineageEntry(2))
    plan = RestorePlan(2, {"0": (cluster.source(0, Tier.PEER, "b"),), "1": (cluster.source(1, Tier.MEMORY, "b"),)})
    placement = cluster.placement({"c": (0,), "b": (1,)}, generation=2, lineage=lineage, restore=plan)
    assert all(reply.ok for reply in cluster.configure(placement).values())
    moved, stayed = Trainer(c, 0, 2, lineage), Trainer(b, 1, 2, lineage)
    assert moved.await_restore(2) is RestoreState.READY
    assert moved.stored(1, 2) == expected
    until(lambda: c.status.restores and b.status.restores)
    (report,) = c.status.restores
    assert (report.source_tier, report.source_host, report.step) == (Tier.PEER, "b", 2)
    assert report.socket_bytes >= len(expected) and report.transport == "tcp"
    until(lambda: b.status.counters.get("restore_bytes_sent", 0) >= report.socket_bytes)  # counted after sending
    assert b.status.counters["restore_bytes_sent"] == report.socket_bytes
    until(lambda: b.status.counters["peer_bytes_sent"] - sent_before >= report.socket_bytes)
    (local,) = b.status.restores
    assert (local.source_tier, local.socket_bytes, local.transport) == (Tier.MEMORY, 0, "")
    until(lambda: c.holds(Tier.PEER, 2, 1))  # re-replicated to the new peer
    for step in (3, 4, 5):
        moved.save(step)
        stayed.save(step)
    until(lambda: moved.world_step == stayed.world_step == 5)


def test_the_spare_that_holds_the_replica_restores_without_a_socket(pair: Pair, cluster: EngineCluster) -> None:
    a, b, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    a.lose()
    lineage = (LineageEntry(1, 0), LineageEntry(2))
    plan = RestorePlan(0, {"0": (cluster.source(0, Tier.PEER, "b"),), "1": (cluster.source(1, Tier.MEMORY, "b"),)})
    cluster.configure(cluster.placement({"b": (0, 1)}, generation=2, lineage=lineage, restore=plan))
    moved = Trainer(b, 0, 2, lineage)
    assert moved.await_restore(2) is RestoreState.READY
    assert moved.stored(1, 0) == first.payload(0)
    until(lambda: len(b.status.restores) == 2)
    report = next(r for r in b.status.restores if r.rank == 0)
    assert (report.source_tier, report.source_host, report.socket_bytes) == (Tier.PEER, "b", 0)
    moved.save(1)
    Trainer(b, 1, 2, lineage).save(1)
    until(lambda: moved.world_step == 1)
    until(lambda: not b.holds(Tier.PEER, 0, 0))  # freed: not needed any more


def test_a_corrupt_replica_is_refused_and_the_next_source_is_used(cluster: EngineCluster) -> None:
    spec = CheckpointSpec(persistent_dir=str(cluster.root / "store"), persistent_every_steps=1)
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    until(lambda: a.holds(Tier.PERSISTENT, 0, 0))
    replica = RankSegments.open(replica_segment(b.prefix, "job", 0))
    view = replica.find(1, 0)
    assert view is not None
    replica.payload(view.index)[-1] ^= 1
    a.lose()
    c = cluster.host("c")
    lineage = (LineageEntry(1, 0), LineageEntry(2))
    sources = (cluster.source(0, Tier.PEER, "b"), cluster.source(0, Tier.PERSISTENT, ""))
    plan = RestorePlan(0, {"0": sources, "1": (cluster.source(1, Tier.MEMORY, "b"),)})
    cluster.configure(cluster.placement({"c": (0,), "b": (1,)}, generation=2, lineage=lineage, restore=plan), spec)
    moved = Trainer(c, 0, 2, lineage)
    assert moved.await_restore(2) is RestoreState.READY
    assert moved.stored(1, 0) == first.payload(0)
    until(lambda: c.status.restores)
    assert c.status.restores[0].source_tier is Tier.PERSISTENT
    assert c.logged("restore_source_skipped")


def test_a_corrupt_local_slot_is_replaced_from_the_peer(pair: Pair, cluster: EngineCluster) -> None:
    a, _, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    view = first.segments.find(1, 0)
    first.segments.payload(view.index)[-1] ^= 1
    lineage = (LineageEntry(1, 0), LineageEntry(2))
    plan = RestorePlan(
        0,
        {
            "0": (cluster.source(0, Tier.MEMORY, "a"), cluster.source(0, Tier.PEER, "b")),
            "1": (cluster.source(1, Tier.MEMORY, "b"),),
        },
    )
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}, generation=2, lineage=lineage, restore=plan))
    again = Trainer(a, 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.READY
    assert again.stored(1, 0) == first.payload(0)
    until(lambda: a.status.restores)
    assert a.status.restores[0].source_tier is Tier.PEER


def test_a_restore_without_any_good_source_fails_with_the_reasons(pair: Pair, cluster: EngineCluster) -> None:
    lineage = (LineageEntry(1, 7), LineageEntry(2))
    plan = RestorePlan(7, {"0": (cluster.source(0, Tier.PEER, "b"),), "1": ()})
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}, generation=2, lineage=lineage, restore=plan))
    again = Trainer(cluster.hosts["a"], 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.FAILED
    assert "missing" in again.segments.control.read_restore().error


def test_a_torn_capture_does_not_count(pair: Pair) -> None:
    a, _, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == 0)
    first.begin_torn(1)
    reply = a.ask(Flush("job", 60.0))
    assert {(c.tier, c.step) for c in reply.copies if c.rank == 0} == {(Tier.MEMORY, 0)}


def test_flush_commits_what_a_dead_trainer_captured_although_the_peer_is_gone(pair: Pair) -> None:
    a, b, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == 0)
    b.kill()
    first.save(1)
    reply = a.ask(Flush("job", 60.0))
    assert (Tier.MEMORY, 1) in {(c.tier, c.step) for c in reply.copies if c.rank == 0}


def test_a_stale_command_is_refused_also_after_a_restart(pair: Pair, cluster: EngineCluster) -> None:
    a, *_ = pair
    newer = cluster.placement({"a": (0,), "b": (1,)}, generation=3)
    older = cluster.placement({"a": (0,), "b": (1,)}, generation=2)
    assert a.ask(Configure(Fence(2, 3), "a", newer, CheckpointSpec())).ok
    assert a.ask(Configure(Fence(1, 2), "a", older, CheckpointSpec())).code == "stale_command"
    assert a.ask(Arm(Fence(1, 9), "job", 5)).code == "stale_command"
    a.kill()
    a.start()
    assert a.ask(Configure(Fence(1, 2), "a", older, CheckpointSpec())).code == "stale_command"
    assert a.ask(Configure(Fence(2, 3), "a", newer, CheckpointSpec())).ok  # repeating it is harmless


def test_arm_names_a_step_and_comes_too_late_for_a_rank_that_passed_it(pair: Pair) -> None:
    a, _, first, second = pair
    first.save(3)
    second.save(3)
    reply = a.ask(Arm(Fence(1, 1), "job", 3))
    assert (reply.ok, reply.code, reply.positions) == (False, "too_late", {"0": 3})
    assert first.segments.control.emergency_step(1) == -1
    reply = a.ask(Arm(Fence(1, 1), "job", 5))
    assert reply.ok and reply.positions == {"0": 3}
    assert first.segments.control.emergency_step(1) == 5
    assert a.ask(AwaitSaved("job", 1, 5, 0.05)).code == "not_saved"
    first.save(5)
    assert a.ask(AwaitSaved("job", 1, 5, 60.0)).ok  # committed and replicated here; the other rank does not matter
    assert a.ask(AwaitSaved("job", 4, 5, 1.0)).code == "stale_command"


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_host_of_another_cluster_is_refused_on_both_sides(cluster: EngineCluster, with_keys: bool) -> None:
    """Without keys of two hosts, by the token that all hosts of a cluster share."""
    a, b = cluster.host("a"), cluster.host("b", token="another token")
    placement = cluster.placement({"a": (0,), "b": (1,)})
    for host, ring in ((a, KEYRING), (b, EngineKeyring("another cluster's"))):
        keys = ring.keys_of(host.host_id, placement) if with_keys else EngineKeys()
        assert host.ask(Configure(Fence(1, 1), host.host_id, placement, CheckpointSpec(), keys)).ok
    until(lambda: a.status.unreachable_peers == ("b",))
    until(lambda: b.logged("peer_refused") and a.logged("peer_refused"))
    assert "token" not in "".join(str(line) for line in a.logged("engine_started"))
    assert not a.logged("peer_connected")


def test_release_leaves_nothing_in_shared_memory(pair: Pair) -> None:
    a, b, first, second = pair
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    for host in (a, b):
        assert host.ask(Release(Fence(1, 1), "job")).ok
        assert host.ask(Release(Fence(1, 1), "job")).ok  # twice is harmless
    assert a.segments() == [] and b.segments() == []
    assert a.status.unreachable_peers == () and a.status.copies == ()
    a.kill()
    a.start()
    assert a.status.copies == ()


def test_a_second_engine_on_the_same_folder_names_the_first(cluster: EngineCluster) -> None:
    a = cluster.host("a")
    second = subprocess.run(a.command(), stderr=subprocess.PIPE, text=True, check=False, timeout=90)
    assert second.returncode == 16
    assert str(a.process.pid) in second.stderr
    assert a.status.ok


def test_sigterm_commits_what_was_captured_and_keeps_the_slots(pair: Pair) -> None:
    a, _, first, _ = pair
    first.save(0)
    assert a.terminate() == 0
    view = first.segments.find(1, 0, SlotState.COMMITTED)
    assert view is not None
    assert not (a.state_dir / "engine.sock").exists()


def test_late_saves_that_an_engine_could_not_report_are_reported_by_the_next_one(pair: Pair) -> None:
    a, _, first, _ = pair
    for step in (1, 2, 3):
        first.notify(SaveWaited("job", 0, 1, step, 0.5))
    until(lambda: a.status.counters.get("saves_late") == 3)
    assert [(late.step, late.count) for late in a.status.late] == [(1, 1)]  # the others are reported together, later
    assert a.terminate() == 0
    a.start()
    assert [(late.step, late.count) for late in a.status.late] == [(3, 2)]
    assert a.terminate() == 0
    assert a.start().status.late == ()


def test_the_server_never_imports_torch(cluster: EngineCluster) -> None:
    a = cluster.host("a")
    assert a.process is not None
    assert "libtorch" not in Path(f"/proc/{a.process.pid}/maps").read_text()
