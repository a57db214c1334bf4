"""What every tier promises: only what can be verified is listed, what is listed can be read back byte for byte, and a
bad copy is refused and not returned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from ckpt_engine import integrity, world_manifest
from ckpt_engine import manifest as manifests
from ckpt_engine.durable_files import UNFINISHED, WRITER
from ckpt_engine.manifest import Manifest
from ckpt_engine.peer_wire import TierNaming
from ckpt_engine.tiers.disk import DiskTier, read_verified
from ckpt_engine.tiers.memory import MemoryTier, SlotTier
from ckpt_engine.tiers.peer import PeerTier
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, StorageFull

LINEAGE = (LineageEntry(1),)
DEAD_AND_RUNNING = (LineageEntry(1, 4), LineageEntry(8))


def shard(step: int, rank: int = 0, *, generation: int = 1) -> tuple[Manifest, bytes, bytes]:
    """(manifest, its bytes, the safetensors file)."""
    payload = save({"w": np.full((700, 500), step, np.float32), "rank": np.array([rank])}, {"step": str(step)})
    described = manifests.describe(
        memoryview(payload),
        job="job",
        generation=generation,
        step=step,
        rank=rank,
        world_size=2,
        code_version="test",
        chunk_bytes=1 << 16,
    )
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
        _, data, payload = shard(step, rank)
        with self.slots.using(rank, create=True) as entry:
            assert entry is not None
            entry.segments.begin_write(step % 2, 1, step, len(payload))[:] = payload
            entry.segments.mark_captured(step % 2)
            assert entry.segments.commit(entry.segments.control.slot(step % 2), data)
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
            payload = entry.segments.payload(view.index)
            integrity.copy_verified(payload, memoryview(target), described.chunk_digests, described.chunk_bytes)
            return bytes(target)

    def flip_a_byte(self, step: int, rank: int = 0) -> None:
        with self.slots.using(rank) as entry:
            assert entry is not None
            entry.segments.payload(step % 2)[-1] ^= 1


class Disk:
    """A folder of one host, or of all."""

    def __init__(self, tier: Tier, root: Path) -> None:
        self.tier, self._root = tier, root
        self.reopen()

    def reopen(self) -> None:
        self.disk = DiskTier(
            self._root, tier=self.tier, job="job", host_id="" if self.tier is Tier.PERSISTENT else "host"
        )
        self.disk.scan()

    def path(self, step: int, rank: int, suffix: str) -> Path:
        return self._root / "job" / "g1" / f"step{step}" / f"rank{rank}{suffix}"

    def put(self, step: int, rank: int = 0) -> bytes:
        described, data, payload = shard(step, rank)
        self.disk.write(described, data, memoryview(payload))
        if self.tier is Tier.PERSISTENT:
            self.disk.seal(1, step, rank + 1)
        return payload

    def put_torn(self, step: int, rank: int = 0) -> None:
        self.put(step, rank)
        self.path(step, rank, ".manifest").unlink()
        self.reopen()

    def copies(self) -> list[ShardCopy]:
        return self.disk.copies()

    def read(self, step: int, rank: int = 0) -> bytes:
        with self.disk.reading(1, step, rank) as (described, _, file):
            target = bytearray(described.payload_bytes)
            read_verified(file, described, memoryview(target))
            return bytes(target)

    def flip_a_byte(self, step: int, rank: int = 0) -> None:
        path = self.path(step, rank, ".safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.fixture(params=list(Tier))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierUnderTest]:
    made: dict[Tier, TierUnderTest] = {
        Tier.MEMORY: Slots(MemoryTier, tmp_path),
        Tier.PEER: Slots(PeerTier, tmp_path),
        Tier.DISK: Disk(Tier.DISK, tmp_path),
        Tier.PERSISTENT: Disk(Tier.PERSISTENT, tmp_path),
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


def test_a_disk_copy_is_read_with_the_safetensors_library_alone(tmp_path: Path) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    disk.put(6, 1)
    tensors = load_file(tmp_path / "job" / "g1" / "step6" / "rank1.safetensors")
    assert (tensors["w"] == 6).all() and tensors["rank"] == [1]


@pytest.mark.parametrize("damage", ["truncate", "manifest", "other", "garbage"])
def test_a_damaged_disk_copy_is_not_listed(tmp_path: Path, damage: str) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    disk.put(1)
    disk.put(2)
    manifest, payload = disk.path(2, 0, ".manifest"), disk.path(2, 0, ".safetensors")
    if damage == "truncate":
        payload.write_bytes(payload.read_bytes()[:-1])
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"rank":0', b'"rank":1'))
    elif damage == "other":
        manifest.write_bytes(disk.path(1, 0, ".manifest").read_bytes())
    else:
        manifest.write_bytes(b"\0" * 100)
    disk.reopen()
    assert [copy.step for copy in disk.copies()] == [1]


def test_a_full_disk_is_said_and_leaves_no_half_copy(tmp_path: Path) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    disk.put(1)
    folder = disk.path(2, 0, "").parent
    folder.mkdir()
    (folder / f".rank0.safetensors{UNFINISHED}{WRITER}").symlink_to("/dev/full")
    with pytest.raises(StorageFull):
        disk.put(2)
    disk.reopen()
    assert [copy.step for copy in disk.copies()] == [1]
    assert list(folder.iterdir()) == []


def test_pruning_keeps_the_newest_complete_steps_and_no_dead_history(tmp_path: Path) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    for step in (1, 2, 3, 4):
        for rank in (0, 1):
            if (step, rank) != (4, 1):
                disk.put(step, rank)
    dead, data, payload = shard(9, 0, generation=7)
    disk.disk.write(dead, data, memoryview(payload))
    disk.disk.prune(naming=TierNaming(Tier.DISK, 4, (2, 3)), lineage=DEAD_AND_RUNNING, ranks=None)
    kept = {(copy.step, copy.rank) for copy in disk.copies()}
    assert kept == {(2, 0), (2, 1), (3, 0), (3, 1), (4, 0)}
    disk.reopen()
    assert {(copy.step, copy.rank) for copy in disk.copies()} == kept
    assert not (tmp_path / "job" / "g7").exists()


def test_pruning_what_another_view_of_the_folder_removed_already_is_no_error(tmp_path: Path) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    for step in (1, 2, 3):
        disk.put(step)
    late = DiskTier(tmp_path, tier=Tier.DISK, job="job", host_id="host")
    late.scan()
    for tier in (disk.disk, late):
        tier.prune(naming=TierNaming(Tier.DISK, 3, (3,)), lineage=LINEAGE, ranks=(0,))
        assert [copy.step for copy in tier.copies()] == [3]


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
        assert entry.segments.slots()  # who was using them can still look
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


def test_a_step_in_a_shared_folder_counts_when_its_world_manifest_is_there(tmp_path: Path) -> None:
    writers = [DiskTier(tmp_path, tier=Tier.PERSISTENT, job="job", host_id="") for _ in range(2)]
    for rank, tier in enumerate(writers):
        described, data, payload = shard(5, rank)
        tier.write(described, data, memoryview(payload))
        assert tier.scan() == []
        assert tier.holds(1, 5, rank)
        assert tier.held(rank, LINEAGE) == (5,)
    assert not (tmp_path / "job" / "g1" / "step5" / "world.manifest").exists()
    writers[0].scan()
    with pytest.raises(CorruptShard, match="ranks \\[2\\]"):
        writers[0].seal(1, 5, 3)
    writers[0].seal(1, 5, 2)
    assert writers[0].sealed_steps(LINEAGE) == (5,)
    for tier in writers:
        assert {copy.rank for copy in tier.scan()} == {0, 1}


@pytest.mark.parametrize("damage", ["garbage", "other step", "other shard", "empty"])
def test_a_damaged_world_manifest_makes_its_step_not_exist(tmp_path: Path, damage: str) -> None:
    disk = Disk(Tier.PERSISTENT, tmp_path)
    disk.put(5)
    disk.put(6)
    manifest = disk.path(6, 0, "").with_name("world.manifest")
    if damage == "garbage":
        manifest.write_bytes(b"\0" * 64)
    elif damage == "empty":
        manifest.write_bytes(b"")
    elif damage == "other step":
        manifest.write_bytes(disk.path(5, 0, "").with_name("world.manifest").read_bytes())
    else:
        digests = (manifests.digest(shard(5)[1]),)
        data = world_manifest.describe("job", 1, 6, digests)
        manifest.write_bytes(data + b"\n" + manifests.digest(data).encode() + b"\n")
    disk.reopen()
    assert [copy.step for copy in disk.copies()] == [5]


def test_the_world_manifest_goes_with_the_shards_of_its_step(tmp_path: Path) -> None:
    disk = Disk(Tier.PERSISTENT, tmp_path)
    for step in (1, 2):
        disk.put(step)
    disk.disk.prune(naming=TierNaming(Tier.PERSISTENT, 2, (2,)), lineage=LINEAGE, ranks=(0,))
    assert [path.name for path in (tmp_path / "job" / "g1").iterdir()] == ["step2"]
    assert disk.disk.sealed_steps(LINEAGE) == (2,)


def test_what_a_killed_writer_left_half_written_is_removed(tmp_path: Path) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    disk.put(1)
    folder = disk.path(2, 0, "").parent
    folder.mkdir()
    left = [folder / f".rank{rank}.safetensors{UNFINISHED}{who}" for rank, who in ((0, "7-ab"), (10, "7-ab"))]
    left.append(folder / f".world.manifest{UNFINISHED}7-ab")
    running = disk.path(1, 0, "").with_name(f".rank0.manifest{UNFINISHED}{WRITER}")
    for path in (*left, running):
        path.write_bytes(b"half")
    disk.disk.remove_unfinished(1)
    assert [path.exists() for path in (*left, running)] == [True, True, True, True]
    disk.disk.remove_unfinished(0)
    assert [path.exists() for path in (*left, running)] == [False, True, False, True]
    disk.disk.remove_unfinished(None)
    assert not folder.exists()
    assert [copy.step for copy in disk.copies()] == [1]


def test_what_is_written_and_removed_during_a_scan_is_not_mistaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(Tier.DISK, tmp_path)
    disk.put(1)
    scan = disk.disk._scan_worlds

    def meanwhile() -> dict[tuple[int, int], world_manifest.WorldManifest]:
        disk.put(2)
        disk.disk.prune(naming=TierNaming(Tier.DISK, 2, (2,)), lineage=LINEAGE, ranks=None)
        return scan()

    monkeypatch.setattr(disk.disk, "_scan_worlds", meanwhile)
    assert [copy.step for copy in disk.disk.scan()] == [2]
