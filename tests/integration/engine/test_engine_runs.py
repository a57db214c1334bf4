"""Two runs of one job name that share a disk folder or a store. The second has its own supervisor, so its generations
begin at 1 again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import Trainer

from ckpt_engine.contracts.control_views import RestoreState
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier, branch

FIRST_RUN, SECOND_RUN = "20251119-080000-000", "20251120-080000-000"
SEEDS = {FIRST_RUN: 1, SECOND_RUN: 2}


def spec_of(tier: Tier, folder: Path) -> CheckpointSpec:
    if tier is Tier.DISK:
        return CheckpointSpec(disk_dir=str(folder), disk_every_steps=1, replicas=0)
    return CheckpointSpec(persistent_dir=str(folder), persistent_every_steps=1, replicas=0)


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(
    cluster: EngineCluster,
    *,
    run: str,
    spec: CheckpointSpec,
    tier: Tier,
    steps: int,
) -> Trainer:
    """One rank on host a saves this many steps. Returns when exactly the newest two are listed."""
    host = cluster.hosts["a"]
    cluster.configure(cluster.placement({"a": (0,)}, run=run), spec)
    host.stays_in_touch()
    worker = Trainer(host, 0, seed=SEEDS[run])
    for step in range(steps):
        worker.save(step)
        until(lambda step=step: host.holds(tier, step, 0))
    until(lambda: {copy.step for copy in host.status.copies if copy.tier is tier} == {steps - 2, steps - 1})
    return worker


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.PERSISTENT])
def test_a_run_sees_overwrites_and_removes_nothing_of_the_run_before(cluster: EngineCluster, tier: Tier) -> None:
    """As many steps are kept as one run writes: if runs were mixed, one would displace the other."""
    root = cluster.root / "shared"
    spec = spec_of(tier, root)
    host = cluster.host("a")
    older = train(cluster, run=FIRST_RUN, spec=spec, tier=tier, steps=4)
    host.lose()  # with everything that knew the first run, except its files
    kept = files_below(root)

    host.start()
    worker = train(cluster, run=SECOND_RUN, spec=spec, tier=tier, steps=3)
    assert {path: data for path, data in files_below(root).items() if path in kept} == kept
    host.lose()

    host.start()
    lineage = branch((LineageEntry(1),), restored_step=2, generation=2)
    plan = RestorePlan(2, {"0": (cluster.source(0, tier, "a"),)})
    cluster.configure(cluster.placement({"a": (0,)}, generation=2, lineage=lineage, restore=plan, run=SECOND_RUN), spec)
    again = Trainer(host, 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.READY
    assert again.stored(1, 2) == worker.payload(2) != older.payload(2)


def test_a_run_takes_no_shard_of_another_run_from_slots_or_peers(cluster: EngineCluster) -> None:
    """State folder and slots stayed; both runs have the same generation, step and rank."""
    spec = CheckpointSpec(replicas=1)
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}, run=FIRST_RUN), spec)
    for worker in (Trainer(a, 0), Trainer(b, 1)):
        worker.save(0)
    for host, rank in ((a, 1), (b, 0)):
        until(lambda host=host, rank=rank: host.holds(Tier.PEER, 0, rank))

    lineage = branch((LineageEntry(1),), restored_step=0, generation=2)
    plan = RestorePlan(0, {"0": (cluster.source(0, Tier.MEMORY, "a"), cluster.source(0, Tier.PEER, "b")), "1": ()})
    cluster.configure(
        cluster.placement({"a": (0,), "b": (1,)}, generation=2, lineage=lineage, restore=plan, run=SECOND_RUN), spec
    )
    assert Trainer(a, 0, 2, lineage).await_restore(2) is RestoreState.FAILED
    assert a.status.copies == b.status.copies == ()


@pytest.mark.parametrize("replicas", [0, 1])
def test_slots_of_a_run_before_that_are_still_in_memory_block_nothing(cluster: EngineCluster, replicas: int) -> None:
    """The state folders were removed, shared memory was not; the first run was in its third generation."""
    spec = CheckpointSpec(replicas=replicas)
    hosts = [cluster.host(name) for name in ("a", "b")]
    ranks = {"a": (0,), "b": (1,)}
    lineage = (LineageEntry(3),)
    cluster.configure(cluster.placement(ranks, generation=3, lineage=lineage, run=FIRST_RUN), spec)
    older = [Trainer(host, rank, 3, lineage, seed=1) for rank, host in enumerate(hosts)]
    for step in range(40, 44):
        for worker in older:
            worker.save(step)
        until(lambda step=step: all(worker.world_step == step for worker in older))
    for host in hosts:
        host.kill()
    for worker in older:
        assert worker.try_save(44)  # captured, but not committed
    for host in hosts:
        shutil.rmtree(host.state_dir)
        host.start()

    cluster.configure(cluster.placement(ranks, run=SECOND_RUN), spec)
    workers = [Trainer(host, rank, seed=2) for rank, host in enumerate(hosts)]
    assert [worker.world_step for worker in workers] == [-1, -1]
    for step in range(3):
        for worker in workers:
            worker.save(step)
        until(lambda step=step: all(worker.world_step == step for worker in workers))
    assert [worker.stored(1, 2) for worker in workers] == [worker.payload(2) for worker in workers]
    listed = {(copy.generation, copy.step) for host in hosts for copy in host.status.copies}
    assert {generation for generation, _ in listed} == {1}
    assert not any(worker.segments.belongs_to(FIRST_RUN) for worker in workers)
    dropped = [line["steps"] for host in hosts for line in host.logged("slots_of_another_run_dropped")]
    assert [43, 44] in dropped
