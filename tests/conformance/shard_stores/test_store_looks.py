"""What a scan of a store costs, and how it treats a manifest that cannot be read at the moment."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.stores.places import Place

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.stored_layout import StoredShard
from ckpt_engine.tiers.shard_listing import side_by_side
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import StorageFull, Unreachable

MakeShard = Callable[..., tuple[Manifest, bytes, memoryview]]
LINEAGE = (LineageEntry(1),)
STEPS = (10, 20, 30)
UNREADABLE = OSError(errno.EIO, os.strerror(errno.EIO))


class CountingStorage:
    """A storage that counts requests, and fails to read given names."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.requests: Counter[str] = Counter()
        self.unreadable: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the storage's own
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def ask(*arguments: Any) -> Any:  # noqa: ANN401
            self.requests[name] += len(arguments[0]) if name == "remove" else 1
            if name == "read" and arguments[0] in self.unreadable:
                raise self.unreadable[arguments[0]]
            return found(*arguments)

        return ask

    def take(self) -> Counter[str]:
        taken, self.requests = self.requests, Counter()
        return taken


def fill(place: Place, shard: MakeShard, world_size: int, steps: tuple[int, ...] = STEPS) -> None:
    store = place.store()
    for step in steps:
        for rank in range(world_size):
            store.write(*shard(step, rank, size_bytes=64))
        if store.tier is Tier.PERSISTENT:
            store.seal(1, step, world_size)


def view(place: Place, *ranks: int) -> tuple[ShardStore, CountingStorage]:
    """A rank's view of the store, as in an engine."""
    storage = CountingStorage(place.storage())
    host_id = "host" if place.tier is Tier.DISK else ""
    wanted = ranks if place.tier is Tier.PERSISTENT else None
    return ShardStore(storage, tier=place.tier, job="job", host_id=host_id, ranks=wanted), storage


@pytest.mark.parametrize("world_size", [2, 12])
def test_a_rank_asks_a_shared_store_as_often_as_it_has_steps_however_large_the_world(
    shared_place: Place, shard: MakeShard, world_size: int
) -> None:
    fill(shared_place, shard, world_size)
    store, storage = view(shared_place, 1)
    store.scan_once()
    store.scan_once()
    # The generations and the steps of the only one; per step the world manifest, the rank's manifest and its shard.
    assert storage.take() == {"folders": 2, "stat": 3 * len(STEPS), "read": 2 * len(STEPS)}
    store.scan()
    assert storage.take() == {"folders": 2, "stat": 3 * len(STEPS)}
    assert store.copies() == shared_place.store().scan()
    assert len(store.copies()) == world_size * len(STEPS)
    assert {copy.step for copy in store.newest_copies(LINEAGE, 2)} == {20, 30}
    assert {copy.step for copy in store.newest_copies(LINEAGE, 1, clean_step=29)} == {20, 30}
    assert {copy.step for copy in store.newest_copies(LINEAGE, 1, clean_step=5)} == {30}
    store.remove_unfinished((1,))
    assert storage.take()["remove"] == 0


def test_pruning_asks_only_about_what_goes(shared_place: Place, shard: MakeShard) -> None:
    fill(shared_place, shard, 4)
    store, storage = view(shared_place, 2)
    store.scan()
    storage.take()
    naming = TierNaming(store.tier, 30, (20, 30))
    store.scan_worlds((1, step) for step in naming.kept)
    store.prune(naming=naming, lineage=LINEAGE, ranks=(2,))
    assert storage.take() == {"stat": 1, "remove": 2}  # a pin; manifest and shard of step 10
    store.prune(naming=naming, lineage=LINEAGE, ranks=(2,))
    assert storage.take() == {}
    assert {copy.step for copy in store.copies()} == {20, 30}
    assert {(copy.step, copy.rank) for copy in shared_place.store().scan()} & {(10, 2)} == set()


def test_a_prune_asks_ahead_of_every_step_whether_it_may_go_on(place: Place, shard: MakeShard) -> None:
    fill(place, shard, 2)
    store, _ = view(place, 0, 1)
    store.scan()
    answers = iter([True, False])
    naming = TierNaming(store.tier, 30, (30,))
    assert not store.prune(naming=naming, lineage=LINEAGE, ranks=(0, 1), may_go_on=lambda: next(answers))
    assert {copy.step for copy in store.copies()} == {20, 30}
    assert store.prune(naming=naming, lineage=LINEAGE, ranks=(0, 1))
    assert {copy.step for copy in store.copies()} == {30}


def test_a_rank_learns_of_a_step_that_was_sealed_elsewhere(shared_place: Place, shard: MakeShard) -> None:
    store, storage = view(shared_place, 0)
    store.scan()
    fill(shared_place, shard, 2, (10,))
    storage.take()
    for _ in range(2):
        store.scan_worlds([(1, 10)])
    assert storage.take() == {"stat": 1, "read": 1}
    assert store.sealed_steps(LINEAGE) == (10,)
    assert [copy.rank for copy in store.copies()] == [1]  # it trusts what it wrote or saw itself


def test_a_multiple_that_was_sealed_since_the_last_look_stays(shared_place: Place, shard: MakeShard) -> None:
    store, storage = view(shared_place, 0)
    for step in STEPS:
        store.write(*shard(step, size_bytes=64))
    other = shared_place.store()
    other.scan()
    other.seal(1, 10, 1)
    for _ in range(2):
        storage.take()
        store.prune(naming=TierNaming(store.tier, 30, (30,)), lineage=LINEAGE, ranks=(0,), keep_every=10)
    assert storage.requests == {}  # step 10 counted once, step 20 never did
    assert store.held(0, LINEAGE) == (10, 30)


def test_a_manifest_that_cannot_be_read_is_no_lost_shard(place: Place, shard: MakeShard) -> None:
    fill(place, shard, 1)
    store, storage = view(place, 0)
    storage.unreadable["g1/step10/rank0.manifest"] = UNREADABLE
    store.scan()
    assert store.has_unread and "Input/output" in next(iter(store.unread().values()))
    assert store.held(0, LINEAGE) == (20, 30)
    assert store.held(0, LINEAGE, or_unread=True) == STEPS
    # A shared place also has the world manifest; a host's own disk has nothing else to go by.
    assert [copy.step for copy in store.copies()] == list(STEPS if place.tier is Tier.PERSISTENT else STEPS[1:])
    store.prune(naming=TierNaming(store.tier, 30, (30,)), lineage=LINEAGE, ranks=None)
    assert {step for step in STEPS if f"g1/step{step}/rank0.manifest" in place.names()} == {10, 30}
    store.scan_unread()
    assert store.has_unread
    storage.unreadable.clear()
    store.scan_unread()
    assert not store.has_unread
    assert store.held(0, LINEAGE) == (10, 30)


def test_a_manifest_that_is_broken_is_a_lost_shard(place: Place, shard: MakeShard) -> None:
    fill(place, shard, 1)
    place.put("g1/step10/rank0.manifest", b"garbage")
    store, _ = view(place, 0)
    store.scan()
    assert not store.has_unread
    assert store.held(0, LINEAGE, or_unread=True) == (20, 30)
    assert [copy.step for copy in store.copies()] == [20, 30]


def test_an_unreadable_world_manifest_is_not_taken_for_a_broken_one(shared_place: Place, shard: MakeShard) -> None:
    fill(shared_place, shard, 1)
    shared_place.put("g1/step20/world.manifest", b"garbage")
    store, storage = view(shared_place, 0)
    storage.unreadable["g1/step10/world.manifest"] = UNREADABLE
    store.scan()
    assert store.sealed_steps(LINEAGE) == (30,)
    assert store.sealed_steps(LINEAGE, or_unread=True) == (10, 30)
    assert [copy.step for copy in store.copies()] == [30]
    storage.unreadable.clear()
    store.scan_unread()
    assert [copy.step for copy in store.copies()] == [10, 30]


def test_a_store_that_went_away_during_a_look_leaves_what_was_known(place: Place, shard: MakeShard) -> None:
    """Its manifests are not requested one by one: each would wait for a timeout."""
    fill(place, shard, 1)
    store, storage = view(place, 0)
    store.scan()
    fill(place, shard, 1, (40, 50))
    before = store.copies()
    storage.unreadable = dict.fromkeys(
        (f"g1/step{step}/{name}" for step in (40, 50) for name in ("rank0.manifest", "world.manifest")),
        Unreachable("It does not answer."),
    )
    storage.take()
    with pytest.raises(Unreachable):
        store.scan()
    assert storage.requests["read"] == 1
    assert store.copies() == before


class ParallelStorage(CountingStorage):
    """Reads manifests, except the first, only when several are requested at once."""

    def __init__(self, storage: Storage, at_once: int) -> None:
        super().__init__(storage)
        self._barrier = threading.Barrier(at_once)
        self._lock = threading.Lock()
        self._reads = self.most = self._now = 0

    def read(self, name: str, limit_bytes: int) -> bytes:
        with self._lock:
            self._reads += 1
            alone = self._reads == 1
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if not alone:
                self._barrier.wait(60.0)
            data: bytes = self._storage.read(name, limit_bytes)
            return data
        finally:
            with self._lock:
                self._now -= 1


def test_whoever_seals_reads_the_manifests_of_many_ranks_side_by_side(shared_place: Place, shard: MakeShard) -> None:
    writer = shared_place.store()
    for rank in range(1 + 2 * 8):
        writer.write(*shard(10, rank, size_bytes=64))
    storage = ParallelStorage(shared_place.storage(), 8)
    store = ShardStore(storage, tier=Tier.PERSISTENT, job="job", host_id="", ranks=(0,))
    store.scan_step(1, 10)
    store.seal(1, 10, 17)
    assert 8 <= storage.most <= 16
    assert {copy.rank for copy in shared_place.store().scan()} == set(range(17))


def test_what_is_asked_side_by_side_ends_and_fails_as_if_it_was_asked_one_by_one() -> None:
    asked: list[int] = []
    late = threading.Event()

    def ask(item: int) -> int:
        asked.append(item)
        if item == 5:
            late.set()
            raise OSError(errno.EIO, "of a later one, and first")
        if item == 4:
            assert late.wait(60.0)
            raise Unreachable("It does not answer.")
        if item > 5:
            threading.Event().wait(0.01)  # the failure is noticed meanwhile
        return item

    with pytest.raises(Unreachable):
        side_by_side(ask, range(100_000), threads=4)  # minutes, unless the failure ends it
    assert 6 <= len(asked) < 100_000
    assert side_by_side(str, range(100), threads=4) == [str(item) for item in range(100)]
    assert side_by_side(str, [], threads=4) == []
    asked.clear()
    with pytest.raises(OSError, match="later"):
        side_by_side(ask, [5, 6, 7], threads=4)
    assert asked == [5]


def test_shards_that_killed_engines_left_without_a_manifest_go_with_their_step(place: Place, shard: MakeShard) -> None:
    """Killed before the manifest was written, or after it was removed: unlisted shards that take up room."""
    fill(place, shard, 2)
    left = ["g1/step5/rank0.safetensors", "g1/step15/rank1.safetensors", "g1/step25/rank0.safetensors"]
    newer = ["g1/step30/rank2.safetensors", "g1/step35/rank0.safetensors", "g2/step10/rank0.safetensors"]
    for name in (*left, *newer):
        place.put(name, bytes(100))
    store, _ = view(place, 0, 1, 2)
    store.scan()
    store.prune(naming=TierNaming(store.tier, 30, (20, 30)), lineage=LINEAGE, ranks=(1,), keep_every=5)
    assert {*place.names()} & {*left} == {left[0], left[2]}
    store.prune(naming=TierNaming(store.tier, 30, (20, 30)), lineage=LINEAGE, ranks=(0, 1, 2), keep_every=5)
    assert not {*place.names()} & {*left}
    assert {*newer} <= {*place.names()}  # they, or their manifests, may be being written
    assert {copy.step for copy in store.copies()} == {10, 20, 30}


def test_shards_with_a_broken_manifest_and_those_whose_bytes_were_bad_go_with_their_step(
    place: Place, shard: MakeShard
) -> None:
    fill(place, shard, 1)
    place.put("g1/step10/rank0.manifest", b"garbage")
    store, _ = view(place, 0)
    store.scan()
    store.prune(naming=TierNaming(store.tier, 20, (20,)), lineage=LINEAGE, ranks=(0,))
    assert not [name for name in place.names() if "step10/rank0" in name]
    store.distrust(1, 20, 0)
    store.scan()
    assert store.held(0, LINEAGE) == (30,)
    store.prune(naming=TierNaming(store.tier, 30, (20, 30)), lineage=LINEAGE, ranks=(0,))
    assert "g1/step20/rank0.safetensors" in place.names(), "its step stays"
    store.prune(naming=TierNaming(store.tier, 30, (30,)), lineage=LINEAGE, ranks=(0,))
    assert "g1/step20/rank0.safetensors" not in place.names()
    assert "g1/step30/rank0.safetensors" in place.names()


def test_a_shard_whose_manifest_could_not_be_written_goes_with_its_step(
    place: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = view(place, 0)
    store.scan()
    with monkeypatch.context() as patched:
        patched.setattr(store, "write_description", full)
        with pytest.raises(StorageFull):
            store.write(*shard(10))
    store.write(*shard(20))
    assert "g1/step10/rank0.safetensors" in place.names()
    store.prune(naming=TierNaming(store.tier, 20, (20,)), lineage=LINEAGE, ranks=(0,))
    assert "g1/step10/rank0.safetensors" not in place.names()
    assert store.held(0, LINEAGE) == (20,)


def test_a_shard_gets_its_manifest_before_it_is_removed_for_want_of_one(place: Place, shard: MakeShard) -> None:
    """A host that is out of touch still writes the step that was named before."""
    fill(place, shard, 1, (20,))
    manifest, manifest_bytes, payload = shard(10)
    place.put("g1/step10/rank0.safetensors", bytes(payload))
    store, _ = view(place, 0)
    store.scan()
    place.store().write(manifest, manifest_bytes, payload)
    store.prune(naming=TierNaming(store.tier, 20, (20,)), lineage=LINEAGE, ranks=(0,))
    assert {"g1/step10/rank0.safetensors", "g1/step10/rank0.manifest"} <= {*place.names()}


def full(stored: StoredShard) -> int:
    raise StorageFull(f"There is no room for the manifest of step {stored.manifest.step}.")
