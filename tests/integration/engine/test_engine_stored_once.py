"""Four ranks on one host, and a real engine: what they hold alike is on its disk once, and restores bit for bit after
all memory is gone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB, EngineHost, Trainer
from support.jobs.attached import attached
from support.jobs.fake_ranks import as_rank, local, spread
from support.stores.memory_target import MemoryTarget
from torch.distributed.tensor import Replicate, Shard

from ckpt_engine.format.stored_layout import HEADER_TENSOR
from ckpt_engine.format.verified_read import TargetSink, read_verified
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_disk
from ckpt_engine.trainer.restore.load_shard import read_file
from ckpt_engine.trainer.restore.load_step import load_step
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier

STEP = 3
RANKS = (0, 1, 2, 3)


def ddp_state(rank: int, world: int) -> dict[str, Any]:
    """A model and its optimizer after a step, the same on every rank; and what each rank has for itself."""
    del world
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(500, 800), torch.nn.Linear(800, 600), torch.nn.Linear(600, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 500)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(rank)
    return {"model": model, "optimizer": optimizer, "generator": generator.get_state(), "rank": rank}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same structure with other values."""
    for tensor in tensors_of(state).values():
        with torch.no_grad():
            tensor.zero_()
    return {**state, "rank": -1}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    for number, entries in state["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.{number}.{name}": value for name, value in entries.items()}
    return found | {"generator": state["generator"]}


def save_all(cluster: EngineCluster, spec: CheckpointSpec, ranks: tuple[int, ...]) -> int:
    """Save the state on these ranks of host a. The bytes on its disk."""
    host = cluster.hosts["a"]
    lineage = (LineageEntry(1, world_size=len(ranks)),)
    cluster.configure(cluster.placement({"a": ranks}, lineage=lineage), spec)
    with ExitStack() as stack:
        handles = []
        for rank in ranks:
            job = stack.enter_context(attached(host, rank, lineage, None, spec, world_size=len(ranks)))
            handles.append(job.save(STEP, ddp_state(rank, len(ranks))))
            assert job.wait_captured(90.0)
        for handle in handles:
            assert handle.durable.wait(90.0), handle
    files = [path for path in Path(spec.disk_dir).rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def test_a_ddp_job_on_four_ranks_takes_the_room_of_one_and_comes_back(cluster: EngineCluster) -> None:
    cluster.host("a")
    alone = CheckpointSpec(disk_dir=str(cluster.root / "alone"), disk_every_steps=1, replicas=0)
    one = save_all(cluster, alone, (0,))
    cluster.hosts["a"].lose()
    cluster.hosts["a"].start()
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=1, replicas=0)
    four = save_all(cluster, spec, RANKS)
    assert four / one <= 1.05, f"{four} bytes for four ranks, {one} for one"
    folder = cluster.root / "disk" / "a" / "job" / "g1" / f"step{STEP}"
    check_files(folder)
    host = cluster.hosts["a"]
    host.kill()
    for path in host.segments():
        path.unlink()
    host.start()
    lineage = (LineageEntry(1, STEP, world_size=4), LineageEntry(2, world_size=4))
    plan = RestorePlan(STEP, {str(rank): (cluster.source(rank, Tier.DISK, "a"),) for rank in RANKS})
    placement = cluster.placement({"a": RANKS}, generation=2, lineage=lineage, restore=plan)
    assert cluster.configure(placement, spec)["a"].ok
    for rank in RANKS:
        state, expected = blank(ddp_state(0, 4)), ddp_state(rank, 4)
        with attached(host, rank, lineage, STEP, spec, world_size=4) as job:
            assert job.restore(state) == STEP + 1
        assert state["rank"] == rank
        for name, value in tensors_of(expected).items():
            assert torch.equal(tensors_of(state)[name], value), name
    assert {report.source_tier for report in host.status.restores} == {Tier.DISK}


def check_files(folder: Path) -> None:
    """What the library alone, the loader of one file, and the loader of any layout make of them."""
    model = ddp_state(0, 4)["model"].state_dict()
    seen: list[str] = []
    for rank in RANKS:
        tensors = load_file(folder / f"rank{rank}.safetensors")
        assert tensors.pop(HEADER_TENSOR).nbytes
        for name, value in tensors.items():
            if name.startswith("model."):
                assert (value == model[name.removeprefix("model.")].numpy()).all()
        seen += tensors
        found = read_file(folder / f"rank{rank}.safetensors")
        assert torch.equal(found["generator"], ddp_state(rank, 4)["generator"]) and found["rank"] == rank
        assert all(torch.equal(found["model"][name], value) for name, value in model.items())
        state = blank(ddp_state(0, 4))
        load_step(folder, state, rank=rank)
        assert all(torch.equal(state["model"].state_dict()[name], value) for name, value in model.items())
    assert sum(name == "model.0.weight" for name in seen) == 1


def test_replicas_of_hsdp_are_stored_once(cluster: EngineCluster) -> None:
    """A mesh of two replicas of two shards."""
    host = cluster.host("a")
    spec = CheckpointSpec(persistent_dir=str(cluster.root / "store"), persistent_every_steps=1, replicas=0)
    lineage = (LineageEntry(1, world_size=4),)
    cluster.configure(cluster.placement({"a": RANKS}, lineage=lineage), spec)
    whole = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
    with ExitStack() as stack:
        handles = []
        for rank in RANKS:
            job = stack.enter_context(attached(host, rank, lineage, None, spec, world_size=4))
            with as_rank(rank, (2, 2)) as mesh:
                handles.append(job.save(STEP, {"w": spread(whole, mesh, (Replicate(), Shard(0)))}))
                assert job.wait_captured(90.0)
        for handle in handles:
            assert handle.durable.wait(90.0), handle
    folder = cluster.root / "store" / "job" / "g1" / f"step{STEP}"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1.05 * whole.nbytes
    for rank in RANKS:
        with as_rank(rank, (2, 2)) as mesh:
            state = {"w": spread(torch.zeros_like(whole), mesh, (Replicate(), Shard(0)))}
            load_step(folder, state, rank=rank)
            assert torch.equal(local(state["w"]), local(spread(whole, mesh, (Replicate(), Shard(0)))))


class Replica(Trainer):
    """All ranks save the same weights, except those that `flipped` names."""

    flipped: tuple[int, ...] = ()

    def payload(self, step: int, count: int = 700_000) -> bytes:
        values = np.random.default_rng([step, self.seed]).random(count, dtype=np.float32)
        if self.rank in self.flipped:
            values[count // 2] += 1
        return save({"weight": values, "own": np.full(3000, self.rank, np.int64)}, {"step": str(step)})


def replicas(host: EngineHost) -> list[Replica]:
    return [Replica(host, rank) for rank in RANKS]


def save_step(trainers: list[Replica], step: int) -> None:
    for trainer in trainers:
        trainer.save(step)


@pytest.mark.parametrize(
    "stage",
    ["disk.data:2", "disk.data:4", "disk.manifest:1", "disk.manifest:4", "disk.written:1", "disk.written:3"],
)
def test_an_engine_killed_anywhere_between_loses_no_step(cluster: EngineCluster, stage: str) -> None:
    host = cluster.host("a", start=False)
    host.start(FLYBALL_FAULT_POINT=stage)
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=1, replicas=0)
    cluster.configure(cluster.placement({"a": RANKS}), spec)
    trainers = replicas(host)
    save_step(trainers, 0)
    until(lambda: host.process is not None and host.process.poll() == -9)
    host.start()
    for step in (0, 1):
        if step:
            save_step(trainers, step)
        until(lambda step=step: all(host.holds(Tier.DISK, step, rank) for rank in RANKS))
    folder = cluster.root / "disk" / "a" / "job" / "g1"
    assert not list(folder.rglob("*.new.*"))
    stored = open_disk(spec.disk_dir, job=JOB, host_id="a", settings=EngineSettings())
    for trainer in trainers:
        for step in (0, 1):
            with stored.reading(1, step, trainer.rank) as (manifest, _, source):
                shard = bytearray(manifest.payload_bytes)
                read_verified(source, manifest, TargetSink(MemoryTarget(memoryview(shard)), before=lambda: None))
            assert shard == trainer.payload(step)


def test_another_host_restores_from_the_disk_with_the_memory_gone(cluster: EngineCluster) -> None:
    """The engine of the disk puts each shard together for its peer."""
    a, b = cluster.host("a"), cluster.host("b")
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=1, replicas=0)
    cluster.configure(cluster.placement({"a": RANKS}), spec)
    trainers = replicas(a)
    save_step(trainers, 0)
    until(lambda: all(a.holds(Tier.DISK, 0, rank) for rank in RANKS))
    a.kill()
    for path in a.segments():
        path.unlink()
    a.start()
    restore = RestorePlan(0, {str(rank): (cluster.source(rank, Tier.DISK, "a"),) for rank in RANKS})
    lineage = (LineageEntry(1, 0), LineageEntry(2))
    placement = cluster.placement({"b": RANKS}, generation=2, lineage=lineage, restore=restore)
    assert all(reply.ok for reply in cluster.configure(placement, spec).values())
    for trainer in trainers:
        until(lambda rank=trainer.rank: b.holds(Tier.MEMORY, 0, rank))
        assert Replica(b, trainer.rank, 2, lineage).stored(1, 0) == trainer.payload(0)
    assert {report.source_tier for report in b.status.restores} == {Tier.DISK}


def test_a_replica_that_differs_is_told_once_and_stays_as_it_is(cluster: EngineCluster) -> None:
    host = cluster.host("a")
    spec = CheckpointSpec(disk_dir=str(cluster.root / "disk"), disk_every_steps=1, replicas=0, disk_keep_latest=4)
    cluster.configure(cluster.placement({"a": RANKS}), spec)
    trainers = replicas(host)
    for trainer in trainers:
        trainer.flipped = (2,)
    for step in (0, 1):
        save_step(trainers, step)
        until(lambda step=step: all(host.holds(Tier.DISK, step, rank) for rank in RANKS))
    (told,) = host.status.differing
    assert (told.tensors, told.count, told.agree, told.differ) == (("weight",), 1, (0, 1, 3), (2,))
    assert host.status.counters["replicas_differ"] == 2
    assert len(host.logged("replicas_differ")) == 1
    folder = cluster.root / "disk" / "a" / "job" / "g1" / "step1"
    assert (folder / "rank2.safetensors").read_bytes() == trainers[2].payload(1), "it shares nothing with the others"
    assert (folder / "rank1.safetensors").stat().st_size < len(trainers[1].payload(1))
