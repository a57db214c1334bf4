"""Four engines with a store that they share: what their ranks hold alike is in it once. Whatever is killed in between,
a step that counts restores bit for bit, and the others do not count."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB, Trainer
from support.stores.memory_target import MemoryTarget

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.format.verified_read import TargetSink, read_verified
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, Tier

HOSTS = ("a", "b", "c", "d")


class Replica(Trainer):
    """All ranks save the same weights, and something of their own; `flipped` ranks save another weight."""

    flipped: tuple[int, ...] = ()

    def payload(self, step: int, count: int = 2_000_000) -> bytes:
        random = np.random.default_rng([step, self.seed])
        weights = {f"w{n}": random.random(count // 8, dtype=np.float32) for n in range(8)}
        if self.rank in self.flipped:
            weights["w3"][count // 16] += 1
        own = {"own": np.full(3000, self.rank, np.int64)}
        return save(weights | own, {"step": str(step)})


class Job:
    """A rank on each of four hosts, and their store."""

    def __init__(self, cluster: EngineCluster, spec: CheckpointSpec | None = None) -> None:
        self.cluster, self.until = cluster, until
        self.spec = spec or CheckpointSpec(
            persistent_dir=str(cluster.root / "store"), persistent_every_steps=1, replicas=0, persistent_keep_latest=2
        )
        self.hosts = [cluster.hosts[name] for name in HOSTS]

    def begin(self, generation: int = 1, lineage: Lineage | None = None, restore: RestorePlan | None = None) -> None:
        ranks = {name: (rank,) for rank, name in enumerate(HOSTS)}
        placement = self.cluster.placement(ranks, generation=generation, lineage=lineage, restore=restore)
        assert all(reply.ok for reply in self.cluster.configure(placement, self.spec).values())
        self.trainers = [Replica(host, rank, generation, lineage) for rank, host in enumerate(self.hosts)]

    def save(self, step: int) -> None:
        for trainer in self.trainers:
            trainer.save(step)

    def store(self) -> ShardStore:
        found = open_persistent(self.spec.persistent_dir, job=JOB, run="", settings=EngineSettings())
        found.scan()
        return found

    def sealed(self, step: int, generation: int = 1) -> bool:
        return (self.folder(step, generation) / "world.manifest").exists()

    def folder(self, step: int, generation: int = 1) -> Path:
        return Path(self.spec.persistent_dir) / JOB / f"g{generation}" / f"step{step}"

    def stored_bytes(self, step: int, generation: int = 1) -> int:
        return sum(path.stat().st_size for path in self.folder(step, generation).iterdir())

    def check(self, step: int, generation: int = 1) -> None:
        """Every rank's shard is in the store, byte for byte."""
        stored = self.store()
        assert {copy.rank for copy in stored.copies() if copy.step == step} == set(range(len(HOSTS)))
        for trainer in self.trainers:
            with stored.reading(generation, step, trainer.rank) as (manifest, _, source):
                shard = bytearray(manifest.payload_bytes)
                read_verified(source, manifest, TargetSink(MemoryTarget(memoryview(shard)), before=lambda: None))
            assert shard == trainer.payload(step)

    def is_shared(self, step: int, generation: int = 1) -> bool:
        return self.stored_bytes(step, generation) <= 1.05 * len(self.trainers[0].payload(step))


@pytest.fixture
def job(cluster: EngineCluster) -> Job:
    for name in HOSTS:
        cluster.host(name)
    return Job(cluster)


def test_a_ddp_job_on_four_hosts_takes_the_room_of_one_and_comes_back(cluster: EngineCluster) -> None:
    """From the store, with all memory gone: the hosts read it once between them. Old steps are removed, by all four."""
    for name in HOSTS:
        cluster.host(name, BROADCAST="on")
    job = Job(cluster)
    job.begin()
    for host in job.hosts:
        host.stays_in_touch()
    for step in (0, 1, 2, 3):
        job.save(step)
        until(lambda step=step: job.sealed(step))
        job.check(step)
        assert job.is_shared(step)
    until(lambda: not list(job.folder(0).glob("*")) and not list(job.folder(1).glob("*")))
    for host in job.hosts:
        host.lose()
        host.start()
    lineage = (LineageEntry(1, 3, world_size=4), LineageEntry(2, world_size=4))
    restore = RestorePlan(3, {str(rank): (job.cluster.source(rank, Tier.PERSISTENT, ""),) for rank in range(4)})
    job.begin(2, lineage, restore)
    for trainer in job.trainers:
        assert trainer.await_restore(2) is RestoreState.READY
        assert trainer.stored(1, 3) == trainer.payload(3)
    for step in (4, 5):
        job.save(step)
        until(lambda step=step: job.sealed(step, generation=2))
        job.check(step, generation=2)
        assert job.is_shared(step, generation=2)


KILLS = [("c", "part"), ("a", "manifest"), ("a", "world")]  # the others: tests/conformance/shard_stores


def test_whichever_engine_is_killed_at_whichever_stage_a_step_that_counts_is_complete(job: Job) -> None:
    job.begin()
    step = 0
    for name, stage in KILLS:
        victim = job.cluster.hosts[name]
        victim.kill()
        victim.start(FLYBALL_FAULT_POINT=f"persistent.{stage}")
        job.save(step)
        until(lambda victim=victim: victim.process is not None and victim.process.poll() == -9)
        if job.sealed(step):
            job.check(step)
        victim.start()
        until(lambda step=step: job.sealed(step))
        job.check(step)
        step += 1
        job.save(step)
        until(lambda step=step: job.sealed(step))
        job.check(step)
        step += 1
    assert job.is_shared(step - 1)


def test_without_an_engine_that_does_not_answer_the_others_store_by_themselves(cluster: EngineCluster) -> None:
    """It stops when another asks for its manifest, and goes on later."""
    for name in HOSTS:
        cluster.host(name, IO_TIMEOUT_S="0.5", HANDSHAKE_TIMEOUT_S="0.5", start=name != "d")
    stopped = cluster.hosts["d"].start(FLYBALL_FAULT_POINT="engine.chunks_announced:1:SIGSTOP")
    job = Job(cluster)
    job.begin()
    job.save(0)
    for rank in (0, 1, 2):
        until(lambda rank=rank: (job.folder(0) / f"rank{rank}.manifest").exists())
        assert (job.folder(0) / f"rank{rank}.safetensors").read_bytes() == job.trainers[rank].payload(0)
    assert not job.sealed(0)
    assert stopped.process is not None
    stopped.process.send_signal(signal.SIGCONT)
    until(lambda: job.sealed(0))
    job.check(0)
    job.save(1)
    until(lambda: job.sealed(1))
    job.check(1)
    assert job.is_shared(1)


def test_a_slow_host_is_waited_for(cluster: EngineCluster) -> None:
    for name in HOSTS:
        cluster.host(name, **({"PERSISTENT_BYTES_PER_S": "1000000"} if name == "d" else {}))  # 2 s for its part
    job = Job(cluster)
    job.begin()
    job.save(0)
    until(lambda: job.sealed(0))
    job.check(0)
    assert job.is_shared(0)


def test_a_replica_of_another_host_that_differs_is_named(job: Job) -> None:
    job.begin()
    for trainer in job.trainers:
        trainer.flipped = (2,)
    job.save(0)
    until(lambda: job.sealed(0))
    job.check(0)
    (found,) = job.hosts[0].status.differing
    assert (found.tensors, found.agree, found.differ) == (("w3",), (0, 1, 3), (2,))
    assert not any(host.status.differing for host in job.hosts[1:])


def test_a_generation_that_ends_in_the_middle_leaves_nothing_that_counts_and_is_not_whole(
    cluster: EngineCluster,
) -> None:
    """One host is killed before its part is there; the others wait for it when the next generation begins."""
    for name in HOSTS:
        cluster.host(name, start=name != "d")
    cluster.hosts["d"].start(FLYBALL_FAULT_POINT="persistent.data")
    job = Job(cluster)
    job.begin()
    job.save(0)
    until(lambda: cluster.hosts["d"].process is not None and cluster.hosts["d"].process.poll() == -9)
    until(lambda: all((job.folder(0) / f"rank{rank}.safetensors").exists() for rank in (0, 1, 2)))
    cluster.hosts["d"].start()
    lineage = (LineageEntry(1, 0, world_size=4), LineageEntry(2, world_size=4))
    memory = {str(rank): (cluster.source(rank, Tier.MEMORY, name),) for rank, name in enumerate(HOSTS)}
    job.begin(2, lineage, RestorePlan(0, memory))
    if job.sealed(0):
        job.check(0)
    for step in (1, 2):
        job.save(step)
        until(lambda step=step: job.sealed(step, generation=2))
        job.check(step, generation=2)
    assert job.is_shared(2, generation=2)
    if job.sealed(0):
        job.check(0)
