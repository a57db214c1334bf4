"""The contract of every tier: only verifiable copies are listed, listed copies read back byte for byte, and bad copies
are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from safetensors.numpy import save
from support.stores.memory_target import MemoryTarget
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.format.verified_read import MemorySource, TargetSink, read_verified
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.memory import MemoryTier, PeerTier, SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.errors import CorruptShard

LINEAGE = (LineageEntry(1),)
DEAD_AND_RUNNING = (LineageEntry(1, 4), LineageEntry(8))


def shard(step: int, rank: int = 0, *, generation: int = 1) -> tuple[Manifest, bytes, bytes]:
    """(manifest, its bytes, the safetensors file)."""
    payload = save({"w": np.full((700, 500), step, np.float32), "rank": np.array([rank])}, {"step": str(step)})
    described = make_manifest(payload, step, rank, generation=generation, world_size=2, chunk_bytes=1 << 16)
    return described, manifests.encode(described), payload


class TierUnderTest(Protocol):
    tier: Tier

    def put(self, step: int, rank: int = 0) -> bytes: ...
    def put_torn(self, step: int, rank: int = 0) -> None: ...
    def copies(self) -> list[ShardCopy]: ...
    def read(self, step: int, rank: int = 0) -> bytes: ...
    def flip_a_byte(self, step: int, rank: int = 0) -> None: ...
    def reopen(self) -> None: ...


class Slots:
    """Own or replica slots."""

    def __init__(self, kind: type[SlotTier], root: Path) -> None:
        self._kind, self._root = kind, root
        self.tier = kind.tier
        self.reopen()

    def reopen(self) -> None:
        self.slots = self._kind(str(self._root / "flyball-test"), "job", "host")

    def put(self, step: int, rank: int = 0) -> bytes:
        manifest, _, payload = shard(step, rank)
        with self.slots.using(rank, create=True) as entry:
            assert entry is not None
            put_in_slot(entry.segments, step % 2, manifest, payload)
        return payload

    def put_torn(self, step: int, rank: int = 0) -> None:
        _, _, payload = shard(step, rank)
        with self.slots.using(rank, create=True) as entry:
            assert entry is not None
            entry.segments.begin_write(step % 2, 1, step, len(payload))[: len(payload)] = payload

    def copies(self) -> list[ShardCopy]:
        return self.slots.copies()

    def read(self, step: int, rank: int = 0) -> bytes:
        with self.slots.using(rank) as entry:
            found = self.slots.find(entry, 1, step) if entry is not None else None
            if entry is None or found is None:
                raise FileNotFoundError
            view, described, _ = found
            target = bytearray(described.payload_bytes)
            source = MemorySource(entry.segments.payload(view.index))
            read_verified(source, described, TargetSink(MemoryTarget(memoryview(target)), before=lambda: None))
            return bytes(target)

    def flip_a_byte(self, step: int, rank: int = 0) -> None:
        with self.slots.using(rank) as entry:
            assert entry is not None
            entry.segments.payload(step % 2)[-1] ^= 1


class Files:
    """A host's own or a shared folder. Object stores are tested in shard_stores/."""

    def __init__(self, tier: Tier, root: Path) -> None:
        self.tier, self._root = tier, root
        self.reopen()

    def reopen(self) -> None:
        host_id = "" if self.tier is Tier.PERSISTENT else "host"
        self.store = ShardStore(FolderStorage(self._root), tier=self.tier, job="job", host_id=host_id)
        self.store.scan()

    def put(self, step: int, rank: int = 0) -> bytes:
        described, data, payload = shard(step, rank)
        self.store.write(described, data, memoryview(payload))
        if self.tier is Tier.PERSISTENT:
            self.store.seal(1, step, rank + 1)
        return payload

    def put_torn(self, step: int, rank: int = 0) -> None:
        self.put(step, rank)
        (self._root / ShardKey(1, step, rank).manifest).unlink()
        self.reopen()

    def copies(self) -> list[ShardCopy]:
        return self.store.copies()

    def read(self, step: int, rank: int = 0) -> bytes:
        with self.store.reading(1, step, rank) as (described, _, stored):
            target = memoryview(bytearray(described.payload_bytes))
            stored.read_into(target, 0)
            integrity.verify(target, described.chunk_digests, described.chunk_bytes)
            return bytes(target)

    def flip_a_byte(self, step: int, rank: int = 0) -> None:
        path = self._root / ShardKey(1, step, rank).shard
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.fixture(params=list(Tier))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierUnderTest]:
    made: dict[Tier, TierUnderTest] = {
        Tier.MEMORY: Slots(MemoryTier, tmp_path),
        Tier.PEER: Slots(PeerTier, tmp_path),
        Tier.DISK: Files(Tier.DISK, tmp_path),
        Tier.PERSISTENT: Files(Tier.PERSISTENT, tmp_path),
    }
    yield made[request.param]


def test_what_is_put_is_listed_and_reads_back_byte_for_byte(tier: TierUnderTest) -> None:
    expected = {(step, rank): tier.put(step, rank) for step in (4, 5) for rank in (0, 1)}
    assert {(copy.step, copy.rank) for copy in tier.copies()} == set(expected)
    for (step, rank), payload in expected.items():
        assert tier.read(step, rank) == payload
    copy = next(copy for copy in tier.copies() if (copy.step, copy.rank) == (4, 1))
    assert (copy.job, copy.generation, copy.tier) == ("job", 1, tier.tier)
    assert copy.host_id == ("" if tier.tier is Tier.PERSISTENT else "host")
    assert copy.size_bytes == len(expected[4, 1])
    assert copy.digest == manifests.digest(shard(4, 1)[1])


def test_a_copy_outlives_the_process_that_put_it(tier: TierUnderTest) -> None:
    payload = tier.put(3)
    tier.reopen()
    assert [copy.step for copy in tier.copies()] == [3]
    assert tier.read(3) == payload


def test_a_torn_copy_does_not_exist(tier: TierUnderTest) -> None:
    tier.put(3)
    tier.put_torn(4)
    assert [copy.step for copy in tier.copies()] == [3]
    with pytest.raises((FileNotFoundError, CorruptShard)):
        tier.read(4)


def test_a_flipped_byte_is_found_when_the_copy_is_read(tier: TierUnderTest) -> None:
    tier.put(3)
    tier.flip_a_byte(3)
    with pytest.raises(CorruptShard):
        tier.read(3)


def test_a_newer_shard_in_the_same_place_takes_the_place_of_the_older(tier: TierUnderTest) -> None:
    tier.put(2)
    payload = tier.put(4)
    assert tier.read(4) == payload
    assert 4 in {copy.step for copy in tier.copies()}


def test_a_slot_that_is_overwritten_while_it_is_looked_up_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(MemoryTier, tmp_path)
    slots.put(1)
    with slots.slots.using(0) as entry:
        assert entry is not None
        old = entry.segments.manifest_bytes(1)

        def overwritten(index: int) -> bytes | None:
            slots.put(3)
            return old

        monkeypatch.setattr(entry.segments, "manifest_bytes", overwritten)
        assert slots.slots.find(entry, 1, 1) is None


def test_released_slots_are_gone_and_stay_gone(tmp_path: Path) -> None:
    slots = Slots(PeerTier, tmp_path)
    slots.put(1)
    with slots.slots.using(0) as entry:
        assert entry is not None
        slots.slots.release()
        assert entry.segments.slots()  # current users can still read them
    with slots.slots.using(0, create=True) as entry:
        assert entry is None
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_engine_drops_the_replicas_it_was_receiving(tmp_path: Path) -> None:
    slots = Slots(PeerTier, tmp_path)
    slots.put(1)
    slots.put_torn(2)
    slots.reopen()
    assert isinstance(slots.slots, PeerTier)
    slots.slots.drop_torn()
    with slots.slots.using(0) as entry:
        assert entry is not None
        assert [view.step for view in entry.segments.slots()] == [-1, 1]
