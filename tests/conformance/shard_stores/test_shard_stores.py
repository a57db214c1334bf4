"""The contract of the disk and persistent tiers on any storage: only verifiable shards are listed, listed shards read
back byte for byte, and damaged, foreign or unfinished ones are refused or absent."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.stores.places import Place

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.format import integrity, world_manifest
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.tiers.durable_files import UNFINISHED, WRITER
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, NotFound

MakeShard = Callable[..., tuple[Manifest, bytes, memoryview]]
LINEAGE = (LineageEntry(1),)
DEAD_AND_RUNNING = (LineageEntry(1, 4), LineageEntry(8))


def put(store: ShardStore, made: tuple[Manifest, bytes, memoryview], *, sealed: bool = True) -> bytes:
    manifest, data, payload = made
    store.write(manifest, data, payload)
    if sealed and store.tier is Tier.PERSISTENT:
        store.seal(manifest.generation, manifest.step, manifest.rank + 1)
    return bytes(payload)


def read(store: ShardStore, generation: int, step: int, rank: int = 0) -> bytes:
    with store.reading(generation, step, rank) as (manifest, _, stored):
        target = memoryview(bytearray(stored.size_bytes))
        for begin in range(0, len(target), 1 << 18):
            stored.read_into(target[begin : begin + (1 << 18)], begin)
        integrity.verify(target, manifest.chunk_digests, manifest.chunk_bytes)
        return bytes(target)


def listed(store: ShardStore) -> list[tuple[int, int]]:
    return sorted((copy.step, copy.rank) for copy in store.scan())


def test_what_is_put_is_listed_and_reads_back_byte_for_byte(place: Place, shard: MakeShard) -> None:
    store = place.store()
    payloads = {(step, rank): put(store, shard(step, rank)) for step in (4, 5) for rank in (0, 1)}
    for view in (store, place.store()):
        view.scan()
        assert {(copy.step, copy.rank) for copy in view.copies()} == set(payloads)
        for (step, rank), payload in payloads.items():
            assert read(view, 1, step, rank) == payload
    manifest, data, payload = shard(4, 1)
    wanted = ShardCopy("job", 1, 4, 1, store.tier, store.host_id, len(payload), manifests.digest(data))
    assert wanted in store.copies()
    assert manifest.payload_bytes == len(payload)


def test_a_shard_is_read_by_the_safetensors_library_as_it_lies(place: Place, shard: MakeShard, tmp_path: Path) -> None:
    payload = put(place.store(), shard(6))
    downloaded = tmp_path / "downloaded.safetensors"
    downloaded.write_bytes(place.get("g1/step6/rank0.safetensors"))
    assert downloaded.read_bytes() == payload
    with safe_open(downloaded, framework="np") as tensors:
        assert list(tensors.get_tensor("step")) == [6, 0]


def test_files_are_for_their_owner_alone(tmp_path: Path, place: Place, shard: MakeShard) -> None:
    put(place.store(), shard(1))
    for path in (tmp_path / "job").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("size_bytes", [0, 4096 - 200, (4 << 20) + 1, (8 << 20), (17 << 20) + 4095])
def test_shards_of_every_size_are_whole(place: Place, shard: MakeShard, size_bytes: int) -> None:
    store = place.store()
    payload = put(store, shard(3, size_bytes=size_bytes))
    assert place.get("g1/step3/rank0.safetensors") == payload
    assert read(store, 1, 3) == payload


def test_several_threads_read_one_open_shard(place: Place, shard: MakeShard) -> None:
    store = place.store()
    payload = put(store, shard(3, size_bytes=20 << 20))
    with store.reading(1, 3, 0) as (manifest, _, stored):
        target = memoryview(bytearray(len(payload)))

        def work(first: int) -> None:
            for begin in range(first << 20, len(target), 2 << 20):
                stored.read_into(target[begin : begin + (1 << 20)], begin)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        integrity.verify(target, manifest.chunk_digests, manifest.chunk_bytes)
        with pytest.raises(CorruptShard):
            stored.read_into(target[:10], len(payload) - 5)


def test_a_shard_is_read_in_any_order(place: Place, shard: MakeShard) -> None:
    store = place.store()
    payload = put(store, shard(3, size_bytes=41 << 20))
    with store.reading(1, 3, 0) as (_, _, stored):
        for begin in (0, 32 << 20, 8 << 20, 40 << 20, 0):
            target = memoryview(bytearray(1 << 16))
            for read_some in (stored.read_into, stored.read_exactly):
                target[:] = bytes(len(target))
                read_some(target, begin)
                assert target == payload[begin : begin + len(target)]
        whole = memoryview(bytearray(len(payload)))
        stored.read_exactly(whole, 0)
        assert whole == payload
        with pytest.raises(CorruptShard):
            stored.read_exactly(target, len(payload) - 5)


def test_writing_a_step_again_changes_nothing(place: Place, shard: MakeShard) -> None:
    first, second = place.store(), place.store()
    payload = put(first, shard(2))
    put(second, shard(2))
    assert read(first, 1, 2) == payload
    assert listed(first) == listed(second) == [(2, 0)]


def test_a_copy_that_was_bad_counts_again_when_it_is_written_again(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(2))
    store.distrust(1, 2, 0)
    assert listed(store) == []
    put(store, shard(2))
    assert listed(store) == [(2, 0)]


def test_bytes_that_are_not_those_of_the_manifest_never_count(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(1))
    manifest, data, payload = shard(2, size_bytes=20 << 20)
    torn = bytearray(payload)
    torn[-1] ^= 1
    with pytest.raises(CorruptShard):
        store.write(manifest, data, memoryview(torn))
    with pytest.raises(CorruptShard):
        store.write(manifest, data, payload[:-1])
    assert "g1/step2/rank0.manifest" not in place.names()
    assert listed(place.store()) == [(1, 0)]


def test_a_slot_that_is_overwritten_while_it_is_written_never_counts(
    place: Place, shard: MakeShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, data, payload = shard(2, size_bytes=40 << 20)
    slot = memoryview(bytearray(payload))
    store = place.store()
    pieces = 0

    def next_save(_: int) -> None:
        nonlocal pieces
        pieces += 1
        if pieces == 3:
            slot[:] = bytes(len(slot))

    monkeypatch.setattr(store, "_before_piece", next_save)
    with pytest.raises(CorruptShard):
        store.write(manifest, data, slot)
    assert not {name for name in place.names() if name.startswith("g1/step2/")}
    assert listed(place.store()) == []
    assert not list(tmp_path.rglob("step2"))  # no empty folder either
    assert not getattr(place, "uploads", list)()  # nor parts in a bucket


def _flip(content: bytes, at: int = -1) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    ["truncated", "extended", "gone", "no manifest", "manifest", "swapped manifest", "garbage", "huge", "empty"],
)
def test_a_damaged_copy_is_not_listed_and_not_read(place: Place, shard: MakeShard, damage: str) -> None:
    store = place.store()
    for step in (1, 2):
        put(store, shard(step))
    manifest, payload = "g1/step2/rank0.manifest", "g1/step2/rank0.safetensors"
    match damage:
        case "truncated":
            place.put(payload, place.get(payload)[:-1])
        case "extended":
            place.put(payload, place.get(payload) + b"\0")
        case "gone":
            place.delete(payload)
        case "no manifest":
            place.delete(manifest)
        case "manifest":
            place.put(manifest, place.get(manifest).replace(b'"rank":0', b'"rank":1'))
        case "swapped manifest":
            place.put(manifest, place.get("g1/step1/rank0.manifest"))
        case "garbage":
            place.put(manifest, b"\0" * 100)
        case "huge":
            place.put(manifest, b"\0" * (manifests.MAX_MANIFEST_BYTES + 1000))
        case "empty":
            place.put(manifest, b"")
    assert listed(place.store()) == listed(store) == [(1, 0)]
    with pytest.raises((FileNotFoundError, CorruptShard)):
        read(place.store(), 1, 2)


def test_every_flipped_byte_of_a_shard_is_found_when_it_is_read(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(1, size_bytes=100))
    name = "g1/step1/rank0.safetensors"
    content = place.get(name)
    assert len(content) < 400
    for at in range(0, len(content), place.flip_every):
        place.put(name, _flip(content, at))
        with pytest.raises(CorruptShard):
            read(store, 1, 1)


def test_every_flipped_byte_of_a_manifest_is_found(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(1, size_bytes=100))
    name = "g1/step1/rank0.manifest"
    content = place.get(name)
    assert len(content) < 2000
    for at in range(0, len(content), place.flip_every):
        place.put(name, _flip(content, at))
        with pytest.raises(CorruptShard):
            store.reading(1, 1, 0).__enter__()


def test_every_flipped_byte_of_a_world_manifest_makes_its_step_not_exist(shared_place: Place, shard: MakeShard) -> None:
    store = shared_place.store()
    put(store, shard(1, size_bytes=100))
    name = "g1/step1/world.manifest"
    content = shared_place.get(name)
    for at in range(0, len(content), shared_place.flip_every):
        shared_place.put(name, _flip(content, at))
        store.scan()
        assert store.copies() == []


def test_shards_that_were_swapped_are_not_taken_for_each_other(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(1, 0))
    put(store, shard(1, 1))
    names = ["g1/step1/rank0.safetensors", "g1/step1/rank1.safetensors"]
    first, second = (place.get(name) for name in names)
    place.put(names[0], second)
    place.put(names[1], first)
    for rank in (0, 1):
        with pytest.raises(CorruptShard):
            read(store, 1, 1, rank)


def test_a_hostile_header_is_no_business_of_the_store(place: Place, shard: MakeShard) -> None:
    """The header's size is not trusted: these are only bytes until a verified reader parses them."""
    store = place.store()
    put(store, shard(1))
    name = "g1/step1/rank0.safetensors"
    place.put(name, struct.pack("<Q", 1 << 62) + place.get(name)[8:])
    with pytest.raises(CorruptShard):
        read(store, 1, 1)


def test_foreign_names_are_left_alone(place: Place, shard: MakeShard) -> None:
    store = place.store()
    put(store, shard(1))
    foreign = [
        "g1/step1/rank00.manifest",
        "g1/step1/rank0.manifest.bak",
        "g1/step1/rank-1.manifest",
        "g1/step1/rank" + "9" * 40 + ".manifest",
        "g01/step1/rank0.manifest",
        "g1/step٣/rank0.manifest",
        "g1/rank0.manifest",
        "README.md",
        "g1/step2/rank0.manifest/deeper",
        "g1/step3/world.manifest/deeper",
    ]
    for name in foreign:
        place.put(name, b"not ours")
    place.put_many(f"data/part{number:04}" for number in range(200 if place.url.startswith("s3:") else 1000))
    before = place.names()
    other = place.store()
    assert listed(other) == [(1, 0)]
    other.remove_unfinished(None)
    other.prune(naming=TierNaming(other.tier, 9, (8,)), lineage=LINEAGE, ranks=None)
    assert listed(place.store()) == []
    ours = {f"g1/step1/{name}" for name in ("rank0.manifest", "rank0.safetensors", "world.manifest")}
    assert place.names() == before - ours


def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, shard: MakeShard) -> None:
    from ckpt_engine.tiers.folder import FolderStorage

    store = ShardStore(FolderStorage(tmp_path), tier=Tier.DISK, job="job", host_id="host")
    put(store, shard(1))
    folder = tmp_path / "g1" / "step1"
    os.mkfifo(folder / "rank1.manifest")
    (folder / "rank2.manifest").symlink_to("rank0.manifest")
    (folder / "rank3.manifest").mkdir()
    (tmp_path / "g1" / "step4").symlink_to("step1")
    assert listed(store) == [(1, 0)]
    for rank in (1, 2, 3):
        with pytest.raises((OSError, CorruptShard)):
            read(store, 1, 1, rank)


def test_a_shared_step_counts_when_its_world_manifest_is_there(shared_place: Place, shard: MakeShard) -> None:
    stores = [shared_place.store() for _ in range(2)]
    for rank, store in enumerate(stores):
        put(store, shard(5, rank), sealed=False)
        assert store.scan() == []
        assert store.holds(1, 5, rank)
        assert store.held(rank, LINEAGE) == (5,)
    assert "g1/step5/world.manifest" not in shared_place.names()
    stores[0].scan_step(1, 5)
    with pytest.raises(CorruptShard, match="ranks \\[2\\]"):
        stores[0].seal(1, 5, 3)
    stores[0].seal(1, 5, 2)
    assert stores[0].sealed_steps(LINEAGE) == (5,)
    for store in stores:
        assert {copy.rank for copy in store.scan()} == {0, 1}
    stores[1].scan()
    assert stores[1].sealed_steps(LINEAGE) == (5,)


@pytest.mark.parametrize("damage", ["garbage", "other step", "other shard", "empty"])
def test_a_damaged_world_manifest_makes_its_step_not_exist(shared_place: Place, shard: MakeShard, damage: str) -> None:
    store = shared_place.store()
    for step in (5, 6):
        put(store, shard(step))
    name = "g1/step6/world.manifest"
    match damage:
        case "garbage":
            shared_place.put(name, b"\0" * 64)
        case "empty":
            shared_place.put(name, b"")
        case "other step":
            shared_place.put(name, shared_place.get("g1/step5/world.manifest"))
        case "other shard":
            data = world_manifest.describe("job", 1, 6, [(manifests.digest(shard(5)[1]), 100)])
            shared_place.put(name, data + b"\n" + manifests.digest(data).encode() + b"\n")
    assert listed(store) == listed(shared_place.store()) == [(5, 0)]


def test_pruning_keeps_what_is_named_and_no_dead_history(place: Place, shard: MakeShard) -> None:
    store = place.store()
    for step in (1, 2, 3, 4):
        for rank in (0, 1):
            if (step, rank) != (4, 1):
                put(store, shard(step, rank))
    put(store, shard(9, 0, generation=7))
    store.prune(naming=TierNaming(store.tier, 4, (2, 3)), lineage=DEAD_AND_RUNNING, ranks=None)
    kept = {(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (9, 0)}  # step 9 is left out, and generation 8 has no own step yet
    assert {(copy.step, copy.rank) for copy in store.copies()} == kept
    for rank in (0, 1):
        put(store, shard(5, rank, generation=8))
    store.prune(naming=TierNaming(store.tier, 5, (3, 5)), lineage=DEAD_AND_RUNNING, ranks=None)
    kept = {(3, 0), (3, 1), (5, 0), (5, 1)}
    assert {(copy.step, copy.rank) for copy in store.copies()} == kept
    assert set(listed(place.store())) == kept
    assert not {name for name in place.names() if name.startswith(("g7", "g1/step1/"))}


def test_pruning_removes_this_hosts_ranks_and_the_world_manifest_with_rank_0(
    shared_place: Place, shard: MakeShard
) -> None:
    store = shared_place.store()
    for step in (1, 2):
        for rank in (0, 1):
            put(store, shard(step, rank))
    naming = TierNaming(store.tier, 2, (2,))
    store.prune(naming=naming, lineage=LINEAGE, ranks=(1,))
    assert {name for name in shared_place.names() if "step1" in name} == {
        "g1/step1/rank0.manifest",
        "g1/step1/rank0.safetensors",
        "g1/step1/world.manifest",
    }
    store.prune(naming=naming, lineage=LINEAGE, ranks=(0,))
    assert not {name for name in shared_place.names() if "step1" in name}
    assert store.sealed_steps(LINEAGE) == (2,)


def test_pruning_what_another_view_removed_already_is_no_error(place: Place, shard: MakeShard) -> None:
    store, late = place.store(), place.store()
    for step in (1, 2, 3):
        put(store, shard(step))
    late.scan()
    for view in (store, late):
        view.prune(naming=TierNaming(view.tier, 3, (3,)), lineage=LINEAGE, ranks=(0,))
        assert [copy.step for copy in view.copies()] == [3]


def test_multiples_and_pinned_steps_stay(place: Place, shard: MakeShard) -> None:
    store, person = place.store(), place.store()
    for step in (10, 11, 12, 13, 20, 21):
        put(store, shard(step))
    put(store, shard(5), sealed=False)  # in a shared place it never counted, so no multiple is kept
    person.pin(1, 12)
    with pytest.raises(NotFound):
        person.pin(1, 14)
    naming = TierNaming(store.tier, 21, (21,))
    store.prune(naming=naming, lineage=LINEAGE, ranks=None, keep_every=5)
    assert person.pinned() == {(1, 12)}
    left = {10, 12, 20, 21} | ({5} if place.tier is Tier.DISK else set())
    assert {step for step, _ in listed(place.store())} == left
    person.unpin(1, 12)
    person.unpin(1, 12)
    store.prune(naming=naming, lineage=LINEAGE, ranks=None, keep_every=5)
    assert {step for step, _ in listed(place.store())} == left - {12}


def test_a_multiple_stays_whose_world_manifest_cannot_be_read_just_now(
    shared_place: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 11, 12):
        put(shared_place.store(), shard(step))
    storage = shared_place.storage()
    read_name = storage.read

    def read_or_fail(name: str, limit_bytes: int) -> bytes:
        if name == "g1/step10/world.manifest":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_name(name, limit_bytes)

    monkeypatch.setattr(storage, "read", read_or_fail)
    store = shared_place.store(storage)
    assert listed(store) == [(11, 0), (12, 0)]
    assert store.sealed_steps(LINEAGE) == (11, 12)
    store.prune(naming=TierNaming(store.tier, 12, (12,)), lineage=LINEAGE, ranks=None, keep_every=5)
    assert listed(shared_place.store()) == [(10, 0), (12, 0)]


def test_one_copy_is_removed_by_name(place: Place, shard: MakeShard) -> None:
    store = place.store()
    for step in (1, 2):
        put(store, shard(step))
    store.remove(next(copy for copy in store.copies() if copy.step == 1))
    assert listed(store) == listed(place.store()) == [(2, 0)]
    assert not {name for name in place.names() if "step1" in name}


def test_what_a_killed_writer_left_half_written_is_removed(tmp_path: Path, shard: MakeShard) -> None:
    from ckpt_engine.tiers.folder import FolderStorage

    store = ShardStore(FolderStorage(tmp_path), tier=Tier.DISK, job="job", host_id="host")
    put(store, shard(1))
    folder = tmp_path / "g1" / "step2"
    folder.mkdir()
    left = [folder / f".rank{rank}.safetensors{UNFINISHED}{who}" for rank, who in ((0, "7-ab"), (10, "7-ab"))]
    left.append(folder / f".world.manifest{UNFINISHED}7-ab")
    running = tmp_path / "g1" / "step1" / f".rank0.manifest{UNFINISHED}{WRITER}"
    for path in (*left, running):
        path.write_bytes(b"half")
    store.remove_unfinished((1,))
    assert [path.exists() for path in (*left, running)] == [True, True, True, True]
    store.remove_unfinished((0,))
    assert [path.exists() for path in (*left, running)] == [False, True, False, True]
    store.remove_unfinished(None)
    assert not folder.exists() and running.exists()
    assert listed(store) == [(1, 0)]


def test_what_is_written_and_removed_during_a_scan_is_not_mistaken(
    place: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.store()
    put(store, shard(1))
    look = store._lister.everything

    def meanwhile(*arguments: Any) -> Any:  # noqa: ANN401 - handed on
        found = look(*arguments)
        put(store, shard(2))
        store.prune(naming=TierNaming(store.tier, 2, (2,)), lineage=LINEAGE, ranks=None)
        return found

    monkeypatch.setattr(store._lister, "everything", meanwhile)
    assert [copy.step for copy in store.scan()] == [2]


def test_a_manifest_that_was_read_is_not_read_again(place: Place, shard: MakeShard) -> None:
    put(place.store(), shard(1))
    storage = place.storage()
    store, reads = place.store(storage), []
    read_one = storage.read

    def count(name: str, limit_bytes: int) -> bytes:
        reads.append(name)
        return read_one(name, limit_bytes)

    storage.read = count
    for _ in range(3):
        assert [copy.step for copy in store.scan()] == [1]
    assert len(reads) == len(set(reads)) > 0
    put(place.store(), shard(2))
    store.scan_step(1, 2)
    assert {copy.step for copy in store.copies()} == {1, 2}
    assert len(reads) == len(set(reads))
