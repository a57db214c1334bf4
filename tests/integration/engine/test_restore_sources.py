"""Real engines and a trainer's own restore: one source after another is corrupted, and the next good one is used."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost
from support.jobs.attached import attached

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.on_host.engine_wire import Flush
from flyball.contracts.on_host.segments import rank_segment, replica_segment
from flyball.sdk.trainer import Job

JOB = "job"  # as in conftest.py
STEP = 3


@pytest.fixture
def spec(cluster: EngineCluster) -> CheckpointSpec:
    return CheckpointSpec(
        disk_dir=str(cluster.root / "disk"),
        disk_every_steps=1,
        persistent_dir=str(cluster.root / "store"),
        persistent_every_steps=1,
        restore_timeout_s=90.0,
    )


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((700_000,), value), "step": int(value)}


def is_restored(found: dict[str, Any]) -> bool:
    return found["step"] == STEP and bool(found["weights"].eq(STEP).all())


@pytest.fixture
def saved(cluster: EngineCluster, spec: CheckpointSpec) -> tuple[EngineHost, EngineHost]:
    """Two hosts, and step 3 of both ranks in every tier."""
    # Without broadcast, in which b would pass on what is bad in a's file: both ranks have the same bytes.
    a, b = cluster.host("a", BROADCAST="off"), cluster.host("b", BROADCAST="off")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    first = (LineageEntry(1),)
    with attached(a, 0, first, None, spec) as one, attached(b, 1, first, None, spec) as other:
        handles = [job.save(STEP, state(STEP)) for job in (one, other)]
        assert all(handle.durable.wait(90.0) for handle in handles), handles
        until(lambda: all(a.holds(tier, STEP, 0) for tier in (Tier.MEMORY, Tier.DISK, Tier.PERSISTENT)))
        until(lambda: b.holds(Tier.PEER, STEP, 0))
    return a, b


def lineage_of(generation: int) -> Lineage:
    return (LineageEntry(1, STEP), LineageEntry(generation))


def begin(cluster: EngineCluster, spec: CheckpointSpec, generation: int, sources: tuple[ShardSource, ...]) -> None:
    plan = RestorePlan(STEP, {"0": sources, "1": (cluster.source(1, Tier.MEMORY, "b"),)})
    placement = cluster.placement(
        {"a": (0,), "b": (1,)}, generation=generation, lineage=lineage_of(generation), restore=plan
    )
    assert all(reply.ok for reply in cluster.configure(placement, spec).values())


def flip_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def flip_slot(base: str) -> None:
    segments = RankSegments.open(base)
    view = segments.find(1, STEP)
    if view is not None:
        segments.payload(view.index)[-5] ^= 1
    segments.close()


def test_a_copy_that_is_bad_in_one_source_after_the_other_is_had_from_the_next(
    cluster: EngineCluster, spec: CheckpointSpec, saved: tuple[EngineHost, EngineHost]
) -> None:
    a, b = saved
    sources = (
        cluster.source(0, Tier.MEMORY, "a"),
        cluster.source(0, Tier.PEER, "b"),
        cluster.source(0, Tier.DISK, "a"),
        cluster.source(0, Tier.PERSISTENT, ""),
    )
    slot = rank_segment(a.prefix, JOB, 0)
    spoil: list[Callable[[], None]] = [
        lambda: None,
        lambda: flip_slot(slot),
        lambda: flip_slot(replica_segment(b.prefix, JOB, 0)),
        lambda: flip_file(cluster.root / "disk" / "a" / JOB / "g1" / f"step{STEP}" / "rank0.safetensors"),
        lambda: flip_file(cluster.root / "store" / JOB / "g1" / f"step{STEP}" / "rank0.safetensors"),
    ]
    for bad, tier in enumerate((Tier.MEMORY, Tier.PEER, Tier.DISK, Tier.PERSISTENT)):
        spoil[bad]()
        if bad > 1:
            flip_slot(slot)  # filled again
            spec = msgspec.structs.replace(spec, replicas=0)  # so that the bad replica is not replaced
        generation = 2 + bad
        begin(cluster, spec, generation, sources)
        with attached(a, 0, lineage_of(generation), STEP, spec) as job:
            found = state(0)
            assert job.restore(found) == STEP + 1
            assert is_restored(found), tier

        def tiers(generation: int = generation) -> list[Tier]:
            return [report.source_tier for report in a.status.restores if report.generation == generation]

        until(tiers)  # the trainer may finish before the engine logs it
        assert tiers()[0] is tier
    assert a.status.counters["corrupt_copies"] >= 4

    flip_slot(slot)
    spoil[4]()
    begin(cluster, spec, 9, sources)
    with attached(a, 0, lineage_of(9), STEP, spec) as job, pytest.raises(SystemExit) as ended:
        job.restore(state(0))
    assert ended.value.code == RestoreFailed.exit_code
    reason = a.logged("restore_failed")[-1]["reason"]
    for part in ("local slot: Chunk", "disk of a: Chunk", "persistent of the store: Chunk", "peer of b:"):
        assert part in str(reason)


@contextmanager
def restoring(job: Job, found: dict[str, Any]) -> Iterator[list[int]]:
    """Start a restore that waits for the engine. Its result is put into the list."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(job.restore(found)))
    thread.start()
    yield results
    thread.join(180.0)
    assert not thread.is_alive()


def lose_memory(cluster: EngineCluster, a: EngineHost, b: EngineHost) -> None:
    """Remove all slots and replicas of rank 0."""
    a.kill()
    for path in [*a.segments(), *b.shm_dir.glob(Path(replica_segment(b.prefix, JOB, 0)).name + ".*")]:
        path.unlink()
    a.start()
    for path in cluster.root.glob("disk/a/*/g*/step*/*.new.*"):
        path.unlink()


def disk_restores(a: EngineHost) -> list[dict[str, Any]]:
    """The engine's log entries of rank 0's restores from disk."""
    return [line for line in a.logged("restore_ready") if line["rank"] == 0 and line["tier"] == "disk"]


def test_a_trainer_that_waits_reads_the_disk_itself(
    cluster: EngineCluster, spec: CheckpointSpec, saved: tuple[EngineHost, EngineHost]
) -> None:
    a, b = saved
    for generation in itertools.count(2):
        lose_memory(cluster, a, b)
        before = len(disk_restores(a))
        with attached(a, 0, lineage_of(generation), STEP, spec) as job:
            found = state(0)
            with restoring(job, found) as results:
                begin(cluster, spec, generation, (cluster.source(0, Tier.DISK, "a"),))
            assert results == [STEP + 1] and is_restored(found)
            until(
                lambda before=before: len(disk_restores(a)) > before
            )  # the trainer may finish before the engine logs it
            if disk_restores(a)[-1]["by_trainer"]:  # else the engine had begun to fill a slot: this thread was held up
                segments = RankSegments.open(rank_segment(a.prefix, JOB, 0))
                assert segments.find(1, STEP) is None
                segments.close()
                again = state(0)
                assert job.restore(again) == STEP + 1 and is_restored(again)
                return
        assert generation < 10


def test_a_file_that_the_trainer_finds_bad_is_replaced_from_the_store(
    cluster: EngineCluster, spec: CheckpointSpec, saved: tuple[EngineHost, EngineHost]
) -> None:
    a, b = saved
    lose_memory(cluster, a, b)
    flip_file(cluster.root / "disk" / "a" / JOB / "g1" / f"step{STEP}" / "rank0.safetensors")
    with attached(a, 0, lineage_of(2), STEP, spec) as job:
        found = state(0)
        with restoring(job, found) as results:
            begin(cluster, spec, 2, (cluster.source(0, Tier.DISK, "a"), cluster.source(0, Tier.PERSISTENT, "")))
        assert results == [STEP + 1] and is_restored(found)
    until(lambda: a.status.restores)
    assert a.status.restores[0].source_tier is Tier.PERSISTENT
    assert a.status.counters["corrupt_copies"] >= 1
    assert a.holds(Tier.PERSISTENT, STEP, 0) and not a.holds(Tier.DISK, STEP, 0)
    a.ask(Flush(JOB, 60.0))  # scans
    assert not a.holds(Tier.DISK, STEP, 0)
