"""One job in an engine's process, without sockets: how its threads work together."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save
from support.clocks.waits import until
from support.hosts.engine_jobs import capture as capture_in
from support.hosts.engine_jobs import configured, engine_job, writers_wait
from support.jobs.placements import make_placement
from support.stores.shards import make_manifest

from ckpt_engine.contracts.notices import Captured, SaveAborted, SaveWaited
from ckpt_engine.contracts.peer_wire import (
    SavedSteps,
    StorageStage,
    StorageVote,
    TierNaming,
    TierReport,
    WorldStep,
)
from ckpt_engine.counters import Counters
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.host.job import EngineJob
from ckpt_engine.host.running_generation import RunningGeneration
from ckpt_engine.host.save_reports import FAILING_AFTER_S
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.rules.slot_rules import SlotState, may_overwrite
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from ckpt_engine.tiers.writing.tier_writer import DiskWriter
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostRanks
from flyball.contracts.on_host.engine_wire import Configure


@contextmanager
def ended(job: EngineJob) -> Iterator[EngineJob]:
    yield job
    job.end(join_timeout_s=60.0)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def job(tmp_path: Path, counters: Counters) -> Iterator[EngineJob]:
    with ended(engine_job(tmp_path, counters=counters)) as made:
        yield made


def configure(generation: int, *ranks: int, disk_dir: str = "", persistent_dir: str = "") -> Configure:
    spec = CheckpointSpec(
        disk_dir=disk_dir, disk_every_steps=1, persistent_dir=persistent_dir, persistent_every_steps=1
    )
    return configured(make_placement({"host": ranks}, generation=generation), spec=spec)


def capture(job: EngineJob, generation: int, step: int, *, slot: int | None = None, rank: int = 0) -> None:
    capture_in(job, step, generation=generation, slot=step % 2 if slot is None else slot, rank=rank)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a writer waits for the name of a step that it wrote ahead."""
    described = threading.Event()
    await_name = DiskWriter._await_name

    def waiting(writer: DiskWriter, *arguments: Any) -> Any:  # noqa: ANN401 - handed on
        described.set()
        return await_name(writer, *arguments)

    monkeypatch.setattr(DiskWriter, "_await_name", waiting)
    return described


def test_a_flush_does_not_wait_for_a_slot_that_is_being_fetched_into(job: EngineJob) -> None:
    job.begin(configure(1, 0))
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        with entry.writing:
            flush = threading.Thread(target=job.flush, args=(0.1,))
            flush.start()
            flush.join(60.0)
            assert not flush.is_alive()
    capture(job, 1, 0)
    job.flush(60.0)
    assert [copy.step for copy in job.copies() if copy.tier is Tier.MEMORY] == [0]


@pytest.mark.parametrize("method", [EngineJob.flush, EngineJob.flush_durably, EngineJob.drain])
def test_a_flush_waits_for_a_generation_that_begins(
    job: EngineJob, monkeypatch: pytest.MonkeyPatch, method: Callable[[EngineJob, float], object]
) -> None:
    begins, go_on = threading.Event(), threading.Event()

    def make_slowly(*arguments: Any, **named: Any) -> RunningGeneration:  # noqa: ANN401 - handed on
        begins.set()
        assert go_on.wait(60.0)
        return RunningGeneration(*arguments, **named)

    job.begin(configure(1, 0))
    monkeypatch.setattr("ckpt_engine.host.job.RunningGeneration", make_slowly)
    threads = [threading.Thread(target=job.begin, args=(configure(2, 0),))]
    threads[0].start()
    assert begins.wait(60.0)
    capture(job, 2, 0)
    threads.append(threading.Thread(target=method, args=(job, 60.0)))
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive(), "the older generation can commit nothing"
    go_on.set()
    for thread in threads:
        thread.join(60.0)
    assert [copy.step for copy in job.copies() if copy.tier is Tier.MEMORY] == [0]


def test_a_world_step_of_an_older_generation_frees_nothing_that_the_running_one_has(job: EngineJob) -> None:
    job.begin(configure(1, 0))
    older = job.generation
    assert older is not None
    job.begin(configure(2, 0, 1))
    job._world_advanced(older)
    assert job.slots.memory.ranks() == [0, 1]
    job.begin(configure(3, 0))
    assert job.generation is not None
    job._world_advanced(job.generation)
    assert job.slots.memory.ranks() == [0]


def test_a_shard_on_disk_is_durable_also_when_older_ones_cannot_be_removed(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def prune(*_: object, **__: object) -> None:
        tried.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ShardStore, "prune", prune)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    capture(job, 1, 0)
    job.drain(60.0)
    assert tried.wait(60.0)
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        assert [view.state for view in entry.segments.slots()] == [SlotState.COMMITTED, SlotState.EMPTY]
        control = entry.segments.control
        until(lambda: control.durable_step(1) == 0)  # pruning is independent of writing
    assert job.save_failures.newest() == []


def test_a_step_is_not_saved_because_the_job_ends_while_it_is_awaited(job: EngineJob) -> None:
    job.begin(configure(1, 0))
    missing: list[list[int]] = []
    waiting = threading.Thread(target=lambda: missing.append(job.await_saved(1, 5, 60.0)))
    waiting.start()
    job.end(join_timeout_s=60.0)
    waiting.join(60.0)
    assert missing == [[0]]
    assert job.await_saved(1, 5, 60.0) == [0], "nobody will save it any more"


def test_a_rank_reports_what_is_newest_whichever_thread_was_first(job: EngineJob) -> None:
    class Pipeline:
        saved_steps: tuple[int, ...] = (1,)

        def report(self, tiers: tuple[TierReport, ...]) -> SavedSteps:
            return SavedSteps("job", 1, 0, self.saved_steps)

    class Coordination:
        def __init__(self) -> None:
            self.received: list[tuple[int, ...]] = []
            self.entered, self.go_on = threading.Event(), threading.Event()

        def report(self, steps: SavedSteps) -> None:
            if not self.entered.is_set():
                self.entered.set()
                assert self.go_on.wait(60.0)
            self.received.append(steps.saved)

    pipeline: Any = Pipeline()
    coordination: Any = Coordination()
    job.begin(configure(1, 0))
    running = job.running
    assert running is not None
    own_pipelines, running.pipelines = running.pipelines, {0: pipeline}
    own_coordination, running.coordination = running.coordination, coordination
    threads = [threading.Thread(target=running._report_rank, args=(0,)) for _ in range(2)]
    threads[0].start()
    assert coordination.entered.wait(60.0)
    pipeline.saved_steps = (1, 2)
    threads[1].start()
    threads[1].join(0.05)  # it must not overtake the first
    coordination.go_on.set()
    for thread in threads:
        thread.join(60.0)
    running.pipelines, running.coordination = own_pipelines, own_coordination
    assert coordination.received == [(1,), (1, 2)]


def test_a_slot_is_held_while_a_slow_disk_writes_from_it_and_newer_steps_are_committed_meanwhile(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, written = threading.Event(), threading.Event()
    write = ShardStore.write

    def slow_write(*arguments: Any) -> int:  # noqa: ANN401 - handed on
        writing.set()
        assert written.wait(60.0)
        return write(*arguments)

    monkeypatch.setattr(ShardStore, "write", slow_write)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    capture(job, 1, 0)
    job.flush(60.0)
    assert writing.wait(60.0)
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        entry.segments.control.use_slots(3)  # as the trainer does, for a job with one slow tier
        for step, slot in ((1, 1), (2, 2), (3, 1)):
            world = entry.segments.read_world()
            free = [
                view.index
                for view in entry.segments.slots()
                if may_overwrite(view, world.step, (LineageEntry(1),), (), world.held)
            ]
            assert slot in free and 0 not in free
            capture(job, 1, step, slot=slot)
            job.flush(60.0)
            until(lambda step=step: entry.segments.read_world().step == step)
            assert entry.segments.read_world().held == {0}
        assert entry.segments.control.durable_step(1) == -1
        written.set()
        job.drain(60.0)
        until(lambda: entry.segments.read_world().held == set())
    assert {copy.step for copy in job.copies() if copy.tier is Tier.DISK} >= {0}


def test_a_due_step_is_written_while_it_is_hashed_and_counts_when_it_is_named(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = threading.Event()
    write_ahead, calls = ShardStore.write_ahead, []

    def watched(store: ShardStore, key: Any, payload: Any, describe: Any, **named: Any) -> int:  # noqa: ANN401
        def after_the_data() -> Any:  # noqa: ANN401 - handed on
            assert not job.disks[Tier.DISK].holds(1, 0, 0)
            with job.slots.memory.using(0) as entry:
                assert entry is not None
                assert entry.segments.slots()[0].state is SlotState.CAPTURED
            described.set()
            return describe()

        calls.append(key.step)
        return write_ahead(store, key, payload, after_the_data, **named)

    monkeypatch.setattr(ShardStore, "write_ahead", watched)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    until(lambda: writers_wait(job))
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        with entry.writing:  # so that nothing is committed meanwhile
            capture(job, 1, 0)
            job.receive_notice(Captured("job", 0, 1, 0, 0))
            assert described.wait(60.0)
        until(lambda: entry.segments.control.durable_step(1) == 0)
        until(lambda: not entry.segments.read_world().held)
    assert calls == [0]
    assert [copy.step for copy in job.copies() if copy.tier is Tier.DISK] == [0]


def test_nothing_is_left_of_a_step_that_was_written_ahead_and_never_named(
    job: EngineJob, described: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoringTogether, "may_write_ahead", lambda *_: True)  # as after a step with nothing alike
    job.begin(configure(1, 0, 1, disk_dir=str(tmp_path / "disk")))
    until(lambda: writers_wait(job))
    capture(job, 1, 0)  # only in rank 0: the world never has it
    job.receive_notice(Captured("job", 0, 1, 0, 0))
    assert described.wait(60.0)
    assert list((tmp_path / "disk").rglob("*.new.*"))
    job.end(join_timeout_s=60.0)
    until(lambda: not any((tmp_path / "disk" / "host" / "job").iterdir()))
    assert job.save_failures.newest() == []


def test_a_writer_outlives_a_machine_without_threads(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ahead = ShardStore.write_ahead

    def short_of_threads(store: ShardStore, key: ShardKey, *arguments: Any, **named: Any) -> int:  # noqa: ANN401
        if key.step == 0:
            raise RuntimeError("can't start new thread")
        return write_ahead(store, key, *arguments, **named)

    monkeypatch.setattr(ShardStore, "write_ahead", short_of_threads)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    until(lambda: job.running is not None and bool(job.running.durable.reports(0)))
    capture(job, 1, 0)
    job.receive_notice(Captured("job", 0, 1, 0, 0))
    until(lambda: bool(job.save_failures.newest()))
    with job.slots.memory.using(0) as entry:  # so that nobody waits for it
        assert entry is not None
        until(lambda: entry.segments.control.settled_step(Tier.DISK, 1) == 0)
        assert entry.segments.control.durable_step(1) == -1
    capture(job, 1, 1)
    job.receive_notice(Captured("job", 0, 1, 1, 1))
    until(lambda: job.disks[Tier.DISK].holds(1, 1, 0))
    assert [failure.step for failure in job.save_failures.newest()] == [0]
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        until(lambda: not entry.segments.read_world().held)


@pytest.mark.parametrize("error", [MemoryError(), KeyError("a fault of its own")])
@pytest.mark.parametrize("fails", ["scan_once", "write", "prune", "holds"])
def test_a_writer_outlives_what_nobody_expected(
    job: EngineJob,
    counters: Counters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    error: Exception,
) -> None:
    failed, method = threading.Event(), getattr(ShardStore, fails)

    def fail_once(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - handed on
        if not failed.is_set():
            failed.set()
            raise error
        return method(*arguments, **named)

    monkeypatch.setattr("ckpt_engine.tiers.writing.tier_writer._LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(ShardStore, fails, fail_once)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    until(lambda: job.running is not None and bool(job.running.durable.reports(0)))
    for step in (0, 1):
        capture(job, 1, step)
        job.flush(60.0)
        with job.slots.memory.using(0) as entry:
            assert entry is not None
            until(lambda step=step: entry.segments.control.settled_step(Tier.DISK, 1) == step)
    until(lambda: bool(job.save_failures.newest()))
    assert job.disks[Tier.DISK].holds(1, 1, 0)
    assert type(error).__name__ in job.save_failures.newest()[0].message
    assert counters.snapshot()["disk_write_failures"] == 1


def test_what_is_written_ahead_makes_way_for_an_older_step_that_is_named(
    job: EngineJob, described: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoringTogether, "may_write_ahead", lambda *_: True)  # as after a step with nothing alike
    job.begin(configure(1, 0, 1, disk_dir=str(tmp_path / "disk")))
    until(lambda: writers_wait(job))
    capture(job, 1, 0)
    job.flush(60.0)
    capture(job, 1, 1)
    job.receive_notice(Captured("job", 0, 1, 1, 1))
    assert described.wait(60.0)
    job.flush(60.0)  # only what is committed is named
    assert job.running is not None
    job.running.durable.receive((TierNaming(Tier.DISK, 0, ()),))
    until(lambda: job.disks[Tier.DISK].holds(1, 0, 0))
    until(lambda: not (tmp_path / "disk" / "host" / "job" / "g1" / "step1").exists())
    assert not job.disks[Tier.DISK].holds(1, 1, 0)
    job.running.durable.receive((TierNaming(Tier.DISK, 1, (0,)),))
    until(lambda: job.disks[Tier.DISK].holds(1, 1, 0))


def test_a_persistent_step_is_listed_when_the_world_manifest_is_written(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, seal_now = threading.Event(), threading.Event()
    seal = ShardStore.seal

    def slow_seal(*arguments: Any) -> None:  # noqa: ANN401 - handed on
        sealing.set()
        assert seal_now.wait(60.0)
        seal(*arguments)

    monkeypatch.setattr(ShardStore, "seal", slow_seal)
    job.begin(configure(1, 0, persistent_dir=str(tmp_path / "store")))
    capture(job, 1, 0)
    job.flush(60.0)
    assert sealing.wait(60.0)
    shards = list((tmp_path / "store").glob("job/g1/step0/rank0.*"))
    assert len(shards) == 2
    assert [copy for copy in job.copies() if copy.tier is Tier.PERSISTENT] == []
    seal_now.set()
    job.drain(60.0)
    assert [copy.step for copy in job.copies() if copy.tier is Tier.PERSISTENT] == [0]
    assert (tmp_path / "store" / "job" / "g1" / "step0" / "world.manifest").exists()


def test_a_host_that_shares_its_cohort_with_nobody_votes_about_what_others_store_together(
    job: EngineJob, tmp_path: Path
) -> None:
    """Of 65 ranks the last one is a cohort by itself, and the others' files count when all have voted."""
    alone = configure(1, 64, persistent_dir=str(tmp_path / "store"))
    hosts = (HostRanks("a", "127.0.0.1", "", tuple(range(64))), *alone.placement.hosts)
    placement = msgspec.structs.replace(alone.placement, world_size=65, hosts=hosts)
    job.begin(msgspec.structs.replace(alone, placement=placement))
    assert job.running is not None
    capture(job, 1, 0, rank=64)
    job.running.commit_captured(time.monotonic() + 60.0)
    named = TierNaming(Tier.PERSISTENT, 0)
    job.running.coordination.receive_world(WorldStep("job", 1, -1, tiers=(named,)), "a")
    until(lambda: job.disks[Tier.PERSISTENT].holds(1, 0, 64))
    (report,) = [one for one in job.running.durable.reports(64) if one.tier is Tier.PERSISTENT]
    assert report.vote == StorageVote(0, StorageStage.ALONE)


def test_a_rank_reports_an_unreadable_manifest_as_held_and_not_before_a_second_scan(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    for step in (0, 1):
        capture(job, 1, step)
        job.flush(60.0)
        until(lambda step=step: job.disks[Tier.DISK].holds(1, step, 0))
    job.end(join_timeout_s=60.0)
    job.running = None
    tries, readable, read = threading.Semaphore(0), threading.Event(), FolderStorage.read

    def bad_block(storage: FolderStorage, name: str, limit_bytes: int) -> bytes:
        if name == "g1/step0/rank0.manifest" and not readable.is_set():
            tries.release()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(storage, name, limit_bytes)

    monkeypatch.setattr(FolderStorage, "read", bad_block)
    monkeypatch.setattr("ckpt_engine.tiers.writing.tier_writer._LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr("ckpt_engine.tiers.writing.tier_writer._UNREAD_S", 3600.0)
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    assert job.running is not None
    for _ in range(3):
        assert tries.acquire(timeout=60.0)
    assert job.running.durable.reports(0) == ()  # so nothing is named, and nobody removes anything
    assert "Input/output error" in job.save_failures.newest()[0].message
    job.running.durable._writers[0]._unread_until_s = 0.0  # as if it stays unreadable
    until(lambda: bool(job.running.durable.reports(0)))
    assert (job.running.durable.reports(0)[0].held, job.running.durable.reports(0)[0].unread) == ((1,), (0,))
    assert job.running.durable.newest(job.generation.lineage) == {Tier.DISK: 1}
    readable.set()
    until(lambda: job.disks[Tier.DISK].holds(1, 0, 0))


def test_a_folder_that_hangs_keeps_one_thread_however_often_it_is_looked_at(
    job: EngineJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, go_on, scan = threading.Semaphore(0), threading.Event(), ShardStore.scan

    def hang(store: ShardStore) -> list[ShardCopy]:
        looks.release()
        assert go_on.wait(60.0)
        return scan(store)

    before = set(threading.enumerate())  # another test's may be about to end

    def threads() -> int:
        return sum(thread.name == "scan-disk" for thread in set(threading.enumerate()) - before)

    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    until(lambda: job.running is not None and bool(job.running.durable.reports(0)))
    monkeypatch.setattr(ShardStore, "scan", hang)
    for _ in range(5):
        job.flush(0.02)
    assert looks.acquire(timeout=60.0) and not looks.acquire(blocking=False)
    assert threads() == 1
    go_on.set()
    job.flush(60.0)
    until(lambda: threads() == 0)
    assert looks.acquire(timeout=60.0)  # all requests during the hang share one scan
    job.flush(60.0)
    until(lambda: threads() == 0)


@pytest.mark.parametrize("ends_by", ["flush", "generation", "drain"])
def test_a_write_that_waits_for_its_bandwidth_goes_on_at_once_when_there_is_haste(tmp_path: Path, ends_by: str) -> None:
    limit = RateLimit(1, monotonic_s=time.monotonic)  # a byte per second: a shard takes an hour
    with ended(engine_job(tmp_path, limits={Tier.DISK: limit})) as job:
        job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
        assert job.running is not None
        durable = job.running.durable
        until(lambda: bool(durable.reports(0)))
        capture(job, 1, 0)
        job.flush(60.0)
        until(lambda: any((tmp_path / "disk").rglob("*.new.*")))
        disk = job.disks[Tier.DISK]
        if ends_by == "flush":
            assert job.flush_durably(60.0) == {"disk": 0}
        elif ends_by == "drain":
            job.drain(60.0)
        else:
            job.begin(configure(2, 0, disk_dir=str(tmp_path / "disk")))
        until(lambda: disk.holds(1, 0, 0))


def test_a_slot_that_changed_after_its_commit_is_dropped_when_the_disk_takes_it(
    job: EngineJob, counters: Counters, tmp_path: Path
) -> None:
    job.begin(configure(1, 0, disk_dir=str(tmp_path / "disk")))
    payload = save({"w": np.arange(1 << 20, dtype=np.float32)})
    manifest = manifests.encode(make_manifest(payload))
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        entry.segments.begin_write(0, 1, 0, len(payload))[:] = payload
        entry.segments.mark_captured(0)
        assert entry.segments.commit(entry.segments.control.slot(0), manifest)
        entry.segments.payload(0)[-1] ^= 1
        job.flush(60.0)
        until(lambda: bool(job.save_failures.newest()))
        until(lambda: entry.segments.slots()[0].state is SlotState.EMPTY)
    assert "chunks changed" in job.save_failures.newest()[0].message
    until(lambda: counters.snapshot().get("corrupt_copies") == 1)
    assert job.copies() == []


def test_late_saves_of_the_running_generation_are_counted(job: EngineJob, counters: Counters) -> None:
    job.begin(configure(2, 0))
    for generation in (1, 2, 2):
        job.receive_notice(SaveWaited("job", 0, generation, 7, 0.5))
    assert counters.snapshot()["saves_late"] == 2
    assert [(late.step, late.count) for late in job.late_saves.newest()] == [(7, 1)]


def test_unreported_late_saves_are_reported_when_their_generation_ends(job: EngineJob) -> None:
    job.begin(configure(2, 0))
    for step in (7, 8):
        job.receive_notice(SaveWaited("job", 0, 2, step, 0.5))
    job.begin(configure(3, 0))
    assert [(late.generation, late.step, late.count) for late in job.late_saves.newest()] == [(2, 7, 1), (2, 8, 1)]


def test_a_rank_that_gives_up_one_save_after_the_other_fails_until_one_is_kept(job: EngineJob) -> None:
    job.begin(configure(2, 0))
    for step in (5, 6):
        job.receive_notice(SaveAborted("job", 0, 2, step, "no slot was free"))
    later = SystemClock().wall_s() + FAILING_AFTER_S + 1
    failing = job.save_failures.failing(later)
    assert failing is not None
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        assert entry.segments.control.settled_step(Tier.MEMORY, 2) == 6, "the trainer can see it"
    assert (failing.ranks, failing.count, failing.step, failing.message) == ((0,), 2, 6, "no slot was free")
    capture(job, 2, 7)
    job.receive_notice(Captured("job", 0, 2, 7, 1))

    def is_over() -> bool:
        report = job.save_failures.failing(later)
        return report is not None and report.ranks == ()

    until(is_over)


def test_when_a_job_is_released_whoever_holds_memory_of_removed_slots_is_asked_for_it(
    tmp_path: Path,
) -> None:
    left: list[list[str]] = []

    def give_memory_back() -> None:
        left.append([found.name for found in tmp_path.glob("flyball-test.*")])

    with ended(engine_job(tmp_path, give_memory_back=give_memory_back)) as job:
        job.begin(configure(1, 0))
        capture(job, 1, 0)
        assert list(tmp_path.glob("flyball-test.*"))
        left.clear()  # the slot's own making asks for it, too
        job.release()
        assert left == [[]]
