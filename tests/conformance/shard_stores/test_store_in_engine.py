"""The persistent tier in an engine's job: a step is written from its slot to the store, counts once it is complete, and
is restored into the memory of an empty host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.engine_jobs import capture as capture_in
from support.hosts.engine_jobs import configured, engine_job, writers_wait
from support.jobs.placements import make_placement
from support.stores.changing_store import ChangingStore, as_it_is, flip, only
from support.stores.places import Bucket, Place

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.host.job import EngineJob
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing import tier_retention
from flyball.contracts.checkpoints import (
    CheckpointSpec,
    LineageEntry,
    RestorePlan,
    ShardCopy,
    ShardSource,
    StoredPoint,
    StoredPoints,
    Tier,
)
from flyball.contracts.errors import StorageFull
from flyball.contracts.on_host.engine_wire import Configure
from flyball.contracts.recovery import complete_points

DEADLINE_S = 90.0


@dataclass
class Contact:
    """A daemon's reports, set by the test."""

    in_touch: Callable[[], bool]
    stored_points: Callable[[], StoredPoints | None]
    knows_clean_steps: bool = True

    def clean_step(self, _job: str) -> int | None:
        return None


@pytest.fixture
def start_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineJob]]:
    """Engines of hosts that share nothing but the store. No step stays for having been the newest: that is a matter of
    time (`test_engine_stored_points`)."""
    monkeypatch.setattr(tier_retention, "LISTED_S", 0.0)
    jobs: list[EngineJob] = []

    def start(
        host_id: str,
        limit: RateLimit | None = None,
        in_touch: Callable[[], bool] = lambda: True,
        stored_points: Callable[[], StoredPoints | None] = lambda: None,
    ) -> EngineJob:
        (tmp_path / host_id).mkdir(exist_ok=True)
        limits = {Tier.PERSISTENT: limit} if limit else {}
        made = engine_job(tmp_path / host_id, host_id, contact=Contact(in_touch, stored_points), limits=limits)
        jobs.append(made)
        return jobs[-1]

    yield start
    for job in jobs:
        job.end(join_timeout_s=DEADLINE_S)


def configure(host_id: str, place: Place, *, generation: int = 1, restore: RestorePlan | None = None) -> Configure:
    lineage = (LineageEntry(1),) if generation == 1 else (LineageEntry(1, restore.step if restore else None),)
    if generation > 1:
        lineage = (*lineage, LineageEntry(generation))
    placement = make_placement({host_id: (0,)}, generation=generation, lineage=lineage, restore=restore)
    spec = CheckpointSpec(replicas=0, persistent_dir=place.url.removesuffix("/job"), persistent_every_steps=1)
    return configured(placement, host_id, spec)


def capture(job: EngineJob, step: int, *, slot: int) -> bytes:
    payload = capture_in(job, step, slot=slot, values=300_000)
    job.flush(DEADLINE_S)
    return payload


def persistent_steps(job: EngineJob) -> list[int]:
    return [copy.step for copy in job.copies() if copy.tier is Tier.PERSISTENT]


def test_a_step_goes_to_the_store_and_comes_back_on_a_host_that_has_nothing(
    shared_place: Place, start_job: Callable[..., EngineJob]
) -> None:
    job = start_job("first")
    job.begin(configure("first", shared_place))
    payload = capture(job, 3, slot=0)
    until(lambda: persistent_steps(job) == [3])
    other = start_job("second")
    source = ShardSource(0, 1, Tier.PERSISTENT, "", "")
    other.begin(configure("second", shared_place, generation=2, restore=RestorePlan(3, {"0": (source,)})))
    with other.slots.memory.using(0) as entry:
        assert entry is not None
        control = entry.segments.control
        until(lambda: control.read_restore().state is RestoreState.READY)
        words = control.read_restore()
        assert (words.step, words.tier) == (3, Tier.PERSISTENT)
        assert entry.segments.payload(words.slot) == payload


def test_a_failed_write_is_reported_and_the_next_step_is_written(
    shared_place: Place, start_job: Callable[..., EngineJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardStore.write

    def fail_once(store: ShardStore, manifest: Any, *arguments: Any) -> int:  # noqa: ANN401 - handed on
        if manifest.step == 1:
            raise StorageFull("It is full.", hint="free space there")
        return write(store, manifest, *arguments)

    monkeypatch.setattr(ShardStore, "write", fail_once)
    job = start_job("first")
    job.begin(configure("first", shared_place))
    capture(job, 0, slot=0)
    until(lambda: persistent_steps(job) == [0])
    capture(job, 1, slot=1)
    until(lambda: [failure.step for failure in job.save_failures.newest()] == [1])
    assert "free space there" in job.save_failures.newest()[0].message
    with job.slots.memory.using(0) as entry:
        assert entry is not None
        until(lambda: not entry.segments.read_world().held)
    capture(job, 2, slot=2)
    until(lambda: persistent_steps(job) == [0, 2])


def test_the_limit_is_asked_for_every_byte(shared_place: Place, start_job: Callable[..., EngineJob]) -> None:
    class Limit(RateLimit):
        def __init__(self) -> None:
            super().__init__(0, monotonic_s=time.monotonic)
            self.asked = 0
            self.lock = threading.Lock()

        def wait(self, size_bytes: int, sleep: Callable[[float], object]) -> None:
            with self.lock:
                self.asked += size_bytes
            super().wait(size_bytes, sleep)

    limit = Limit()
    job = start_job("first", limit)
    job.begin(configure("first", shared_place))
    payload = capture(job, 0, slot=0)
    until(lambda: persistent_steps(job) == [0])
    assert limit.asked == len(payload)
    assert msgspec.to_builtins(job.save_failures.newest()) == []


class CutOffEngine:
    """A host of one rank whose contact with the supervisor the test controls."""

    def __init__(
        self, place: Place, start_job: Callable[..., EngineJob], stored_points: StoredPoints | None = None
    ) -> None:
        self.place = place
        self.is_in_touch = True
        self.stored_points = stored_points
        self.job = start_job("host-a", in_touch=lambda: self.is_in_touch, stored_points=lambda: self.stored_points)
        self.job.begin(configure("host-a", place))

    def save_steps(self, *steps: int) -> None:
        for step in steps:
            capture(self.job, step, slot=step % 2)
            until(lambda newest=step: newest in persistent_steps(self.job))

    def comes_to_have(self, *steps: int) -> None:
        until(lambda: persistent_steps(self.job) == [*steps])

    def comes_to_leave(self, *steps: int) -> None:
        """The persistent steps that it reports."""
        until(lambda: [copy.step for copy in self.place.store().scan()] == [*steps])


@pytest.fixture
def cut_host(shared_place: Place, start_job: Callable[..., EngineJob]) -> CutOffEngine:
    """Out of touch since step 4, now at step 7. It has kept everything."""
    host = CutOffEngine(shared_place, start_job)
    host.save_steps(0, 1, 2, 3)
    host.comes_to_have(2, 3)
    host.is_in_touch = False
    host.save_steps(4, 5, 6, 7)
    host.comes_to_have(2, 3, 6, 7)
    return host


def test_out_of_touch_with_the_supervisor_what_others_may_restore_stays(cut_host: CutOffEngine) -> None:
    cut_host.is_in_touch = True
    cut_host.save_steps(8)
    cut_host.comes_to_have(7, 8)


def test_what_was_reported_in_a_contact_too_short_for_a_prune_stays(cut_host: CutOffEngine) -> None:
    cut_host.job.report_copies()
    cut_host.save_steps(8)
    cut_host.comes_to_have(2, 3, 7, 8)  # reports out of touch cannot be relied on
    cut_host.is_in_touch = True
    cut_host.job.report_copies()
    cut_host.is_in_touch = False
    cut_host.save_steps(9, 10, 11)
    cut_host.comes_to_have(2, 3, 7, 8, 10, 11)
    cut_host.is_in_touch = True
    cut_host.save_steps(12)
    cut_host.comes_to_have(11, 12)


def test_the_newest_step_that_the_supervisor_knows_stays_however_far_behind_it_is(
    shared_place: Place, start_job: Callable[..., EngineJob]
) -> None:
    host = CutOffEngine(
        shared_place, start_job, stored_points={}
    )  # it has stored nothing yet, and may store any of these
    host.save_steps(0, 1, 2, 3, 4)
    host.comes_to_leave(0, 1, 2, 3, 4)
    host.stored_points = {"job": StoredPoint(2, 1)}
    host.save_steps(5)
    host.comes_to_leave(2, 3, 4, 5)
    host.save_steps(*range(6, 24))  # without a newer answer: its database is away
    host.comes_to_leave(2, *range(8, 24))
    host.stored_points = {"job": StoredPoint(30, 7)}  # outside this generation's lineage
    host.is_in_touch = False  # the cut
    host.save_steps(24, 25, 26)
    host.comes_to_leave(2, *range(8, 24), 25, 26)
    host.is_in_touch, host.stored_points = True, {"job": StoredPoint(26, 1)}
    host.save_steps(27)
    host.comes_to_leave(26, 27)


def test_all_ranks_hear_from_the_coordinators_host_what_the_supervisor_may_know(
    shared_place: Place, start_job: Callable[..., EngineJob]
) -> None:
    host = CutOffEngine(shared_place, start_job, stored_points={})
    host.save_steps(0, 1, 2)
    running = host.job.running
    assert running is not None

    def spared() -> list[tuple[int, ...]]:
        return [naming.spared for schedule in running.durable.schedules if (naming := schedule.naming) is not None]

    until(lambda: spared() == [(0, 1, 2)])
    host.stored_points = {"job": StoredPoint(2, 1)}
    host.save_steps(3)
    until(lambda: spared() == [(2, 3)])


def test_what_a_generation_began_with_stays_until_the_supervisor_reports_what_it_stored(
    shared_place: Place, start_job: Callable[..., EngineJob]
) -> None:
    before = CutOffEngine(shared_place, start_job, stored_points={})
    before.save_steps(0, 1, 2)
    before.job.end(join_timeout_s=DEADLINE_S)
    host = CutOffEngine(shared_place, start_job, stored_points={})
    host.save_steps(3, 4)
    host.comes_to_leave(0, 1, 2, 3, 4)
    host.stored_points = {"job": StoredPoint(4, 1)}
    host.save_steps(5)
    host.comes_to_leave(4, 5)


def test_what_a_superseded_engine_goes_on_to_write_and_seals_is_dead_to_those_that_came_after(
    shared_place: Place, start_job: Callable[..., EngineJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, write = threading.Event(), threading.Event(), ShardStore.write

    def write_slowly(store: ShardStore, manifest: Any, *arguments: Any) -> int:  # noqa: ANN401 - handed on
        if manifest.step == 4:
            writing.set()
            assert go_on.wait(DEADLINE_S)
        return write(store, manifest, *arguments)

    monkeypatch.setattr(ShardStore, "write", write_slowly)
    superseded = start_job("host-a")
    superseded.begin(configure("host-a", shared_place))
    capture(superseded, 3, slot=0)
    until(lambda: persistent_steps(superseded) == [3])
    capture(superseded, 4, slot=1)
    assert writing.wait(DEADLINE_S)
    after = start_job("host-b")
    source = ShardSource(0, 1, Tier.PERSISTENT, "", "")
    placed = configure("host-b", shared_place, generation=2, restore=RestorePlan(3, {"0": (source,)}))
    after.begin(placed)
    until(lambda: persistent_steps(after) == [3])  # else it may find step 4 unsealed, and remove it
    go_on.set()
    until(lambda: superseded.disks[Tier.PERSISTENT].sealed_steps((LineageEntry(1),)) == (3, 4))
    after.flush(DEADLINE_S)  # it checks again
    assert persistent_steps(after) == [3]
    assert complete_points(shared_place.store().scan(), placed.placement.lineage, 1) == {(3, 1)}


def test_a_prune_that_lasts_ends_when_the_touch_does_and_what_it_left_stays(
    shared_place: Place, shard: Callable[..., Any], start_job: Callable[..., EngineJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shared_place.store()
    for step in range(6):
        store.write(*shard(step, size_bytes=64))
        store.seal(1, step, 1)
    is_in_touch, remove = True, ShardStore.remove

    def remove_slowly(store: ShardStore, copy: ShardCopy) -> None:
        nonlocal is_in_touch
        remove(store, copy)
        is_in_touch = False

    monkeypatch.setattr(ShardStore, "remove", remove_slowly)
    job = start_job("host-a", in_touch=lambda: is_in_touch)
    job.begin(configure("host-a", shared_place))

    def save_step(step: int) -> None:
        """Wait until no more copies are removed."""
        capture(job, step, slot=step % 2)
        until(lambda: writers_wait(job, kept=step))

    save_step(6)
    save_step(7)
    assert persistent_steps(job) == [1, 2, 3, 4, 5, 6, 7]
    monkeypatch.setattr(ShardStore, "remove", remove)
    is_in_touch = True
    save_step(8)
    until(lambda: persistent_steps(job) == [7, 8])


def test_an_engine_that_begins_out_of_touch_leaves_what_was_there(
    shared_place: Place, start_job: Callable[..., EngineJob]
) -> None:
    job = start_job("host-a")
    job.begin(configure("host-a", shared_place))
    capture(job, 0, slot=0)
    until(lambda: persistent_steps(job) == [0])
    job.end(join_timeout_s=DEADLINE_S)
    again = start_job("host-a", in_touch=lambda: False)  # the engine before it was killed while the host was cut off
    again.begin(configure("host-a", shared_place), resumed=True)
    for step in range(1, 5):
        capture(again, step, slot=step % 2)
        until(lambda newest=step: newest in persistent_steps(again))
    until(lambda: persistent_steps(again) == [0, 3, 4])


def test_no_good_step_goes_while_newer_ones_arrive_changed(
    s3_environment: str, bucket: Bucket, start_job: Callable[..., EngineJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention goes by what was found to be there; and so does an engine that starts anew."""
    changing = ChangingStore(s3_environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", changing.endpoint)
    try:
        job = start_job("first")
        job.begin(configure("first", bucket))
        for step in (0, 1):
            capture(job, step, slot=step % 3)
            until(lambda newest=step: newest in persistent_steps(job))
        changing.upload = only("rank0.safetensors", flip(99))
        for step in (2, 3, 4):
            capture(job, step, slot=step % 3)
            until(lambda newest=step: job.save_failures.newest()[-1:] and job.save_failures.newest()[-1].step == newest)
        assert "does not hold what was written" in job.save_failures.newest()[-1].message
        assert [copy.step for copy in bucket.store().scan()] == [0, 1]
        changing.upload = as_it_is
        capture(job, 5, slot=2)
        until(lambda: persistent_steps(job) == [1, 5])
    finally:
        changing.close()
