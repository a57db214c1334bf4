"""The disk tiers of several hosts under one coordinator, with engines that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer
from support.stores.shards import make_manifest

from ckpt_engine.format import manifest as manifests
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_persistent
from flyball.contracts.checkpoints import CheckpointSpec, Tier

JOB = "job"  # as in conftest.py


def steps_on(host: EngineHost, tier: Tier, rank: int) -> set[int]:
    return {copy.step for copy in host.status.copies if (copy.tier, copy.rank) == (tier, rank)}


def common_steps(cluster: EngineCluster) -> set[int]:
    a, b = cluster.hosts["a"], cluster.hosts["b"]
    return steps_on(a, Tier.DISK, 0) & steps_on(b, Tier.DISK, 1)


def newest_after(cluster: EngineCluster, step: int) -> int:
    """The newest common step, as soon as it is beyond `step`. Hosts are asked in turn, so two replies may briefly have
    no step in common."""
    found = step

    def is_there() -> bool:
        nonlocal found
        found = max(common_steps(cluster), default=-1)
        return found > step

    until(is_there)
    return found


def test_hosts_always_have_a_disk_step_in_common_whichever_engine_is_killed(cluster: EngineCluster) -> None:
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=2)
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    first, second = Trainer(a, 0), Trainer(b, 1)

    def train(begin: int, end: int) -> None:
        for step in range(begin, end):
            first.save(step)
            second.save(step)

    newest = -1
    for begin, killed in ((0, b), (10, a), (20, None)):
        train(begin, begin + 9)
        newest = newest_after(cluster, newest)
        if killed is not None:
            killed.kill()
            killed.start()
            newest_after(cluster, newest - 1)
    until(lambda: common_steps(cluster) >= {28})
    until(lambda: len(steps_on(a, Tier.DISK, 0)) <= 2 and steps_on(a, Tier.DISK, 0) == steps_on(b, Tier.DISK, 1))
    until(lambda: first.world_step == second.world_step == 28)


def test_a_step_in_the_store_counts_on_every_host_when_all_ranks_are_there(cluster: EngineCluster) -> None:
    store = cluster.root / "store"
    spec = CheckpointSpec(persistent_dir=str(store), persistent_every_steps=1)
    a = cluster.host("a")
    b = cluster.host("b", start=False)
    b.start(FLYBALL_FAULT_POINT="persistent.manifest")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    first, second = Trainer(a, 0), Trainer(b, 1)
    first.save(0)
    second.save(0)
    until(lambda: b.process is not None and b.process.poll() == -9)
    until((store / "job" / "g1" / "step0" / "rank0.manifest").exists)
    assert not a.holds(Tier.PERSISTENT, 0, 0)  # half a step does not count
    assert manifests_in(store) == set()
    b.start()
    for host in (a, b):
        until(lambda host=host: host.holds(Tier.PERSISTENT, 0, 0 if host is a else 1))
    assert manifests_in(store) == {"g1/step0"}


@pytest.mark.parametrize("stage", ["disk.data", "disk.manifest", "disk.written"])
def test_an_engine_killed_while_it_writes_to_its_disk_writes_the_step_after_all(
    cluster: EngineCluster, stage: str
) -> None:
    disk = cluster.root / "disk"
    a = cluster.host("a", start=False)
    a.start(FLYBALL_FAULT_POINT=stage)
    spec = CheckpointSpec(disk_dir=str(disk), disk_every_steps=1, replicas=0)
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    worker = Trainer(a, 0)
    worker.save(0)
    until(lambda: a.process is not None and a.process.poll() == -9)
    a.start()
    until(lambda: a.holds(Tier.DISK, 0, 0))
    worker.save(1)
    until(lambda: a.holds(Tier.DISK, 1, 0))
    assert not list(disk.rglob("*.new.*"))
    for step in (0, 1):
        assert (disk / "a" / "job" / f"g1/step{step}/rank0.safetensors").read_bytes() == worker.payload(step)


def manifests_in(store: Path) -> set[str]:
    return {path.parent.relative_to(store / "job").as_posix() for path in store.glob("job/g*/step*/world.manifest")}


def test_steps_that_are_kept_for_ever_do_not_fill_what_engines_tell(cluster: EngineCluster) -> None:
    """A message is limited to 16 MiB, and every host reports the shared tier."""
    root = cluster.root / "store"
    spec = CheckpointSpec(persistent_dir=str(root), persistent_every_steps=1, persistent_keep_every=1)
    store = open_persistent(str(root), job=JOB, settings=EngineSettings())
    host = cluster.host("a")
    rank = Trainer(host, 0)
    for step in range(40):
        payload = memoryview(rank.payload(step, count=10))
        manifest = make_manifest(payload, step, job=JOB)
        store.write(manifest, manifests.encode(manifest), payload)
        store.seal(1, step, 1)
    cluster.configure(cluster.placement({"a": (0,)}), spec)
    until(lambda: max(steps_on(host, Tier.PERSISTENT, 0), default=-1) == 39)
    assert steps_on(host, Tier.PERSISTENT, 0) == set(range(24, 40))
    assert len(list(root.rglob("world.manifest"))) == 40
