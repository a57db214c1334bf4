"""A restore by another number of ranks goes on, or says why not, when a host dies in the middle, a copy is bad, a rank
asks for nonsense, or the engine is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB
from support.jobs.fake_ranks import as_rank
from support.jobs.resharded import STEP, Make, Ranks, ReshardedJob, state_of, truth

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.contracts.wanted_chunks import WantedChunks, WantedShard, wanted_name
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import wire
from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import Placement
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.on_host.engine_wire import GetStatus
from flyball.contracts.on_host.segments import rank_segment, replica_segment

FOUR: Ranks = {"a": (0, 1), "b": (2, 3)}


def flip(base: str, offset: int) -> None:
    """Flip a bit of the step in a slot."""
    segments = RankSegments.open(base)
    view = segments.find(1, STEP)
    assert view is not None
    segments.payload(view.index)[offset] ^= 1
    segments.close()


@contextmanager
def restoring(job: ReshardedJob, placement: Placement, rank: int) -> Iterator[list[BaseException]]:
    """One rank restores in the background. How it failed is put into the list."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            job.restore(placement, rank)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield failures
    thread.join(180.0)
    assert not thread.is_alive()


def test_a_source_that_dies_in_the_middle_is_replaced_by_the_next(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(FOUR)
    cluster.host("c")
    a = cluster.hosts["a"]
    a.kill()
    a.start(FLYBALL_FAULT_POINT="engine.chunks_announced:3")  # after the headers of its two shards
    placement = job.begin({"c": (0,), "b": (1,)})
    with restoring(job, placement, 0) as failures:
        until(lambda: a.process is not None and a.process.poll() is not None)
    assert failures == []
    c = cluster.hosts["c"]
    assert c.status.counters["restore_sources_skipped"] >= 1
    report = job.reports()[0]
    assert report.source_host in ("b", "") and report.size_bytes > 0


def test_a_flipped_bit_in_the_nearest_copy_is_found_and_had_from_elsewhere(
    job_of: Make, cluster: EngineCluster
) -> None:
    job = job_of(FOUR, disk=True)
    a, b = cluster.hosts["a"], cluster.hosts["b"]
    flip(rank_segment(a.prefix, JOB, 0), -5)  # read by the trainer itself
    flip(replica_segment(b.prefix, JOB, 0), -5)
    job.restore_all({"a": (0,), "b": (1,)})
    assert a.status.counters["corrupt_copies"] >= 1
    assert not a.holds(Tier.MEMORY, STEP, 0), "dropped"


def test_a_flipped_bit_in_a_peers_copy_is_found_on_arrival(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(FOUR)
    cluster.host("c")
    flip(rank_segment(cluster.hosts["a"].prefix, JOB, 1), -5)
    placement = job.begin({"c": (0, 1)})
    for rank in (0, 1):
        job.restore(placement, rank)
    assert cluster.hosts["c"].status.counters["corrupt_copies"] >= 1


def test_a_flipped_bit_in_a_header_is_found_before_the_trainer_sees_it(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(FOUR, replicas=0, disk=True)
    flip(rank_segment(cluster.hosts["a"].prefix, JOB, 0), 300)
    job.restore_all({"a": (0,), "b": (1,)})
    assert cluster.hosts["a"].status.counters["corrupt_copies"] >= 1


def test_without_a_good_copy_every_source_is_named(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(FOUR, replicas=0)
    a = cluster.hosts["a"]
    flip(rank_segment(a.prefix, JOB, 0), -5)
    placement = job.begin({"a": (0,), "b": (1,)})
    with job.attach(placement, 0) as attached, pytest.raises(SystemExit) as ended:
        job.restore(placement, 0, job=attached)
    assert ended.value.code == RestoreFailed.exit_code
    (failed,) = a.logged("restore_failed")
    assert "No source has step 3 of rank 0" in str(failed["reason"])
    job.restore(placement, 1)  # needs nothing of it
    job.await_tidy()


NONSENSE = (
    (b"{", "Not a valid WantedChunks"),
    (b'{"shards": [], "more": 1}', "Not a valid WantedChunks"),
    (wire.encode(WantedChunks((WantedShard(9, ((0, 1),)),))), "asks for the shard of rank 9"),
    (wire.encode(WantedChunks((WantedShard(1, ((0, 1 << 30),)),))), "and the shard has"),
    (wire.encode(WantedChunks((WantedShard(1, ((2, 1), (0, 1))),))), "do not follow"),
    (wire.encode(WantedChunks((WantedShard(1, ()), WantedShard(1, ())))), "asks for it twice"),
)


def test_ranks_that_ask_for_nonsense_fail_alone(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of({"a": (0, 1)}, replicas=0)
    ranks = tuple(range(len(NONSENSE) + 2))
    placement = job.begin({"a": ranks})
    a = cluster.hosts["a"]
    for rank, (asked, message) in enumerate(NONSENSE, 1):
        segments = RankSegments.open(rank_segment(a.prefix, JOB, rank))
        read = segments.control.read_restore
        until(lambda read=read: read().state is RestoreState.FOLDER)
        folder = Path(read().path)
        (folder / "its.new").write_bytes(asked)
        (folder / "its.new").rename(folder / wanted_name(rank, 0))
        until(lambda read=read: read().state is RestoreState.FAILED)
        assert message in read().error
        segments.close()
    for rank in (ranks[0], ranks[-1]):
        job.restore(placement, rank)
    job.await_tidy()


def test_an_engine_that_is_killed_in_the_middle_is_followed_by_the_next(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(FOUR, replicas=0)
    c = cluster.host("c")
    c.kill()
    c.start(FLYBALL_FAULT_POINT="engine.chunks_half:6")  # the headers are one request each
    placement = job.begin({"c": (0, 1)})
    with restoring(job, placement, 0) as failures:
        until(lambda: c.process is not None and c.process.poll() is not None)
        left = job.folders()
        assert left
        c.start()
    assert failures == []
    assert not set(left) & set(job.folders())
    job.restore(placement, 1)
    job.await_tidy()


def test_a_newer_generation_ends_a_restore_and_frees_its_memory(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of({"a": (0, 1)}, replicas=0)
    job.begin({"a": (0, 1, 2)})
    until(job.folders)
    (old,) = job.folders()
    reports = job.restore_all({"a": (0,)})
    assert not old.exists()
    assert reports[0].tier_bytes.keys() == {Tier.MEMORY}


def test_too_little_memory_is_said(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of({"a": (0, 1)}, replicas=0)
    c = cluster.host("c", MEMORY_LIMIT_BYTES=str(20 << 20))
    job.begin({"c": (0,)})
    placement = job.begin({"c": (0,)})
    with job.attach(placement, 0) as attached, pytest.raises(SystemExit):
        job.restore(placement, 0, job=attached)
    assert "the configured memory limit is 20.0 MiB" in str(c.logged("restore_failed")[-1]["reason"])


def test_the_same_ranks_restore_in_another_layout(job_of: Make, cluster: EngineCluster) -> None:
    """A rank finds that its shard does not fit, and asks for those of all."""
    job = job_of({"a": (0,), "b": (1,)}, replicas=0)
    placement = job.begin({"a": (0,), "b": (1,)})
    with job.attach(placement, 0) as attached:
        state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in truth().items()}
        assert attached.restore(state) == STEP + 1  # whole tensors, of which each rank saved half
        assert all(torch.equal(state[name], value) for name, value in truth().items())
    job.restore(placement, 1)  # as it was saved
    job.await_tidy()
    report = job.reports()[0]
    assert report.tier_bytes.keys() == {Tier.MEMORY, Tier.PEER}


def test_what_was_restored_is_saved_by_the_new_ranks(job_of: Make, cluster: EngineCluster) -> None:
    """The next step is one of the new world, in every tier. The old one is left as it was until newer ones replace it;
    then nothing of it stays, whoever saved it."""
    job = job_of(FOUR, disk=True, store=str(cluster.root / "store"))
    placement = job.begin({"a": (0,), "b": (1,)})
    store, disk = cluster.root / "store" / JOB, cluster.root / "disk"

    def digests(generation: int, step: int) -> list[str]:
        lines = (store / f"g{generation}/step{step}/world.manifest").read_bytes().splitlines()
        found: list[str] = msgspec.json.decode(lines[0])["digests"]
        return found

    with ExitStack() as stack:
        jobs = [stack.enter_context(job.attach(placement, rank)) for rank in (0, 1)]
        for rank, attached in enumerate(jobs):
            job.restore(placement, rank, job=attached)
        for host in cluster.hosts.values():  # without a supervisor a store's steps stay
            host.ask(GetStatus(in_touch_until_s=time.monotonic() + 600.0))
        for step in range(STEP + 1, STEP + 4):
            handles = []
            for rank, attached in enumerate(jobs):
                with as_rank(rank, (2,)) as mesh:
                    handles.append(attached.save(step, {**state_of(mesh, truth()), "rank": rank}))
                    assert attached.wait_captured(90.0)
            assert all(handle.durable.wait(90.0) for handle in handles), handles
            until((store / f"g2/step{step}/world.manifest").exists)
            assert len(digests(2, step)) == 2
            if step == STEP + 1:
                assert len(digests(1, STEP)) == 4
        until(lambda: not (store / f"g1/step{STEP}").exists())
        until(lambda: not list(disk.glob(f"*/{JOB}/g1/step{STEP}")))
