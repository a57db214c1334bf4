"""A slow tier with an extra slot delays no save; without one, saves wait for it."""

from __future__ import annotations

from pathlib import Path

from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import Trainer

from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import slot_count
from flyball.contracts.checkpoints import CheckpointSpec, Tier

SAVES = 30


def test_saves_go_on_while_a_slow_store_writes_and_its_step_stays_whole(cluster: EngineCluster, tmp_path: Path) -> None:
    host = cluster.host("a", DISK_BYTES_PER_S="1000")  # twenty minutes for a shard
    spec = CheckpointSpec(disk_dir=str(tmp_path), disk_every_steps=1)
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(host, 0)
    size_bytes = len(worker.payload(0))
    assert worker.segments.settle(MemoryPlan(size_bytes, slots=slot_count(spec))).slots == 3
    worker.save(0)
    until(lambda: worker.segments.read_world().held == {0})
    for step in range(1, SAVES):
        worker.save(step)
        until(lambda step=step: worker.world_step == step)
    assert worker.segments.read_world().held == {0}
    assert worker.stored(1, 0) == worker.payload(0)
    assert not host.holds(Tier.DISK, 0, 0)
    host.kill()
    host.start(FLYBALL_CKPT_DISK_BYTES_PER_S="0")
    until(lambda: host.holds(Tier.DISK, SAVES - 1, 0))
    until(lambda: not worker.segments.read_world().held)


def test_with_two_slots_a_save_waits_for_the_slow_store_and_loses_nothing(
    cluster: EngineCluster, tmp_path: Path
) -> None:
    host = cluster.host("a", DISK_BYTES_PER_S="1000")
    spec = CheckpointSpec(disk_dir=str(tmp_path), disk_every_steps=1)
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(host, 0)
    worker.save(0)
    until(lambda: worker.segments.read_world().held == {0})
    worker.save(1)
    until(lambda: worker.world_step == 1)
    assert not worker.try_save(2)  # slot 0 is being written to disk, slot 1 has the world step
    host.kill()
    host.start(FLYBALL_CKPT_DISK_BYTES_PER_S="0")
    worker.save(2)
    until(lambda: worker.world_step == 2)
