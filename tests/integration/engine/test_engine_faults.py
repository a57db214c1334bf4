"""Engines killed at exact points, disks that fill up, copies that are left only on a disk."""

from __future__ import annotations

import pytest
from safetensors.numpy import load_file
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier
from flyball.contracts.on_host.engine_wire import Flush
from flyball.contracts.on_host.segments import replica_segment


def died(host: EngineHost) -> bool:
    return host.process is not None and host.process.poll() == -9


@pytest.mark.parametrize(
    "point", ["engine.commit:2", "engine.offer:2", "engine.replica:2", "engine.shard_half:2", "engine.replicated:2"]
)
def test_an_engine_killed_in_the_middle_goes_on_where_it_was(cluster: EngineCluster, point: str) -> None:
    a, b = cluster.host("a"), cluster.host("b", start=False)
    b.start(FLYBALL_FAULT_POINT=point)
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    first.save(1)
    second.save(1)
    until(lambda: died(b))
    replica = RankSegments.open(replica_segment(b.prefix, "job", 0))
    assert replica.find(1, 0) is not None  # the newest world step is untouched
    b.start()
    until(lambda: first.world_step == second.world_step == 1)
    view = replica.find(1, 1)
    assert view is not None and bytes(replica.payload(view.index)) == first.payload(1)


def test_steps_that_are_due_reach_the_disk_and_restore_from_there(cluster: EngineCluster) -> None:
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=2)
    a = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(a, 0)
    for step in range(7):
        worker.save(step)
    until(lambda: a.holds(Tier.DISK, 6, 0))
    until(lambda: worker.segments.control.durable_step(1) == 6)
    until(lambda: sum(copy.tier is Tier.DISK for copy in a.status.copies) <= 2)  # the newest two are kept
    tensors = load_file(cluster.root / "disk" / "a" / "job" / "g1" / "step6" / "rank0.safetensors")
    assert tensors["step"] == [6]
    expected = worker.payload(6)
    a.kill()
    for path in a.segments():
        path.unlink()
    a.start()
    reply = a.ask(Flush("job", 60.0))
    assert (Tier.DISK, 6) in {(copy.tier, copy.step) for copy in reply.copies}
    lineage = (LineageEntry(1, 6), LineageEntry(2))
    plan = RestorePlan(6, {"0": (cluster.source(0, Tier.DISK, "a"),)})
    cluster.configure(cluster.placement({"a": (0,)}, generation=2, lineage=lineage, restore=plan), spec)
    again = Trainer(a, 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.READY
    assert again.stored(1, 6) == expected
    until(lambda: a.status.restores)  # the trainer is informed first
    (report,) = a.status.restores
    assert (report.source_tier, report.source_host, report.socket_bytes) == (Tier.DISK, "a", 0)


def test_a_shard_on_another_hosts_disk_comes_through_its_engine(cluster: EngineCluster) -> None:
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=1)
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(a, 0)
    worker.save(0)
    until(lambda: a.holds(Tier.DISK, 0, 0))
    for path in a.segments():
        path.unlink()
    lineage = (LineageEntry(1, 0), LineageEntry(2))
    plan = RestorePlan(0, {"0": (cluster.source(0, Tier.DISK, "a"),)})
    cluster.configure(cluster.placement({"b": (0,)}, generation=2, lineage=lineage, restore=plan), spec)
    moved = Trainer(b, 0, 2, lineage)
    assert moved.await_restore(2) is RestoreState.READY
    assert moved.stored(1, 0) == worker.payload(0)
    until(lambda: b.status.restores)
    report = b.status.restores[0]
    assert (report.source_tier, report.source_host) == (Tier.DISK, "a")
    assert report.socket_bytes >= report.size_bytes


def test_a_disk_that_cannot_be_written_fails_visibly_and_the_memory_tier_goes_on(cluster: EngineCluster) -> None:
    blocked = cluster.root / "disk"
    blocked.write_text("a file where the folder should be")
    spec = CheckpointSpec(disk_dir=str(blocked), disk_every_steps=1)
    a = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(a, 0)
    for step in range(4):
        worker.save(step)
    until(lambda: worker.world_step == 3)
    until(lambda: a.status.counters.get("disk_write_failures", 0) > 0)
    until(lambda: a.status.failures and "disk" in a.status.failures[-1].message)
    assert worker.segments.control.durable_step(1) == -1


def test_a_shard_that_is_no_safetensors_file_fails_its_save_only(cluster: EngineCluster) -> None:
    a = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}))
    worker = Trainer(a, 0)
    worker.save(0)
    until(lambda: worker.world_step == 0)
    slot = next(view for view in worker.segments.slots() if view.state is SlotState.EMPTY)
    worker.segments.begin_write(slot.index, 1, 1, 100)[:] = b"\xff" * 100
    worker.segments.mark_captured(slot.index)
    until(lambda: a.status.failures)  # found by the scan, without a notice
    worker.save(2)
    until(lambda: worker.world_step == 2)


def test_a_peer_that_stays_away_fails_saves_and_not_for_ever(cluster: EngineCluster) -> None:
    a, b = cluster.host("a", REPLICATE_TIMEOUT_S="1.0"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = first, second = Trainer(a, 0), Trainer(b, 1)

    def agree(begin: int) -> int:
        """The first step that both have. A delayed peer may also cost one."""
        for step in range(begin, begin + 20):
            for rank in (second, first):
                rank.save(step)
            until(lambda step=step: all(rank.knows_end_of(step) for rank in ranks))
            if all(rank.world_step == step for rank in ranks):
                return step
        raise AssertionError("no step was agreed on")

    agreed = agree(0)
    b.kill()
    for lost in (agreed + 1, agreed + 2):
        first.save(lost)  # the second, since the first was given up
    until(lambda: {failure.step for failure in a.status.failures} >= {agreed + 1, agreed + 2})
    b.start()
    until(lambda: a.status.unreachable_peers == ())
    agree(agreed + 3)


@pytest.mark.parametrize("away", ["a", "c"])
def test_a_step_that_one_rank_alone_has_is_abandoned_once_the_engine_is_back(cluster: EngineCluster, away: str) -> None:
    """After a restart on fewer hosts: rank 1 is new on its host, and has two empty slots there."""
    hosts = [cluster.host(name) for name in "abc"]
    cluster.configure(cluster.placement({"a": (0,), "b": (1,), "c": (2,)}))
    three = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for step in (0, 1):
        for rank in three:
            rank.save(step)
        until(lambda step=step: all(rank.world_step == step for rank in three))
    lineage = (LineageEntry(1, 1, world_size=3), LineageEntry(2, world_size=2))
    plan = RestorePlan(1, {str(rank): (cluster.source(rank, Tier.MEMORY, host),) for rank, host in enumerate("abc")})
    cluster.configure(cluster.placement({"a": (0,), "c": (1,)}, generation=2, lineage=lineage, restore=plan))
    two = first, moved = Trainer(hosts[0], 0, 2, lineage), Trainer(hosts[2], 1, 2, lineage)
    cluster.hosts[away].kill()
    first.save(2)
    moved.save(2)
    moved.save(3)
    world = first.segments.read_world()
    assert first.segments.choose(world.step, lineage, world.abandoned, world.held) is None
    first.segments.control.note_aborted(3)
    cluster.hosts[away].start()
    until(lambda: 3 in moved.segments.read_world().abandoned and all(rank.world_step == 2 for rank in two))
    for rank in two:
        rank.save(4)
    until(lambda: all(rank.world_step == 4 for rank in two))


def test_a_slot_that_went_bad_before_it_was_replicated_is_found_and_dropped(cluster: EngineCluster) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: first.world_step == second.world_step == 0)
    b.kill()
    first.save(1)
    until(lambda: a.holds(Tier.MEMORY, 1, 0))
    view = first.segments.find(1, 1)
    assert view is not None
    first.segments.payload(view.index)[-1] ^= 1
    b.start()
    until(lambda: any("corrupt" in failure.message for failure in a.status.failures))
    until(lambda: not a.holds(Tier.MEMORY, 1, 0))
    second.save(2)
    first.save(2)
    until(lambda: first.world_step == second.world_step == 2)
