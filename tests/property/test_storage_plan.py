"""What ranks hold alike is planned to be stored once, and each shard can be put together again, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load
from support.stores.shards import make_manifest

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format, stored_layout
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import Block, TensorHeader
from ckpt_engine.format.stored_layout import (
    HEADER_TENSOR,
    Composition,
    Extent,
    FileHeader,
    StoredLayout,
    StoredTogether,
    check_file_header,
)
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.rules import storage_plan
from ckpt_engine.rules.storage_plan import HeldShard, StoragePlan, StoredPart, plan
from flyball.contracts.errors import CorruptShard

CHUNK_BYTES = 1 << 10
Content = Mapping[str, tuple[bytes, Block | None]]  # a rank's tensors


@pytest.fixture(autouse=True, scope="module")
def _small_tensors_count() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_plan, "MIN_SHARED_BYTES", 8)
        patch.setattr(storage_plan, "WORTH_IT_BYTES", 1)
        patch.setattr(storage_plan, "WORTH_IT_SHARE", 0.0)
        yield


def shard(rank: int, content: Content, note: str = "", world_size: int = 8) -> tuple[HeldShard, bytes]:
    tensors, offset = {}, 0
    for name, (data, _) in content.items():
        tensors[name] = TensorHeader("U8", (len(data),), (offset, offset + len(data)))
        offset += len(data)
    metadata = {"note": note}
    if blocks := {name: block for name, (_, block) in content.items() if block is not None}:
        metadata[shard_format.SHARDING_KEY] = shard_format.encode_blocks(blocks)
    header = shard_format.join_header(metadata, shard_format.encode_tensors(tensors))
    capacity = -(-(len(header) + 8) // 64) * 64 - 8
    payload = memoryview(bytearray(8 + capacity + offset))
    shard_format.write_header(payload, header, capacity)
    payload[8 + capacity :] = b"".join(data for data, _ in content.values())
    manifest = make_manifest(payload, 3, rank, world_size=world_size, chunk_bytes=CHUNK_BYTES)
    held = HeldShard(shard_format.read_header(payload), manifest, manifests.digest(manifests.encode(manifest)))
    return held, bytes(payload)


def planned(
    payloads: Mapping[int, bytes],
    shards: Mapping[int, HeldShard],
    most_hashed_chunks: int | None = None,
    hashed: dict[int, set[int]] | None = None,
) -> StoragePlan:
    """`hashed` gets the chunks of each rank that were asked for."""

    def hash_range(rank: int, begin: int, end: int) -> bytes:
        assert 0 <= begin <= end <= len(payloads[rank])
        if hashed is not None:
            hashed.setdefault(rank, set()).update(range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)))
        return xxhash.xxh3_128_digest(payloads[rank][begin:end])

    return plan(shards, hash_range, most_hashed_chunks=most_hashed_chunks)


def stored_file(part: StoredPart, payload: bytes) -> bytes:
    return part.header + b"".join(payload[begin:end] for begin, end in part.ranges)


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, Content]:
    """Ranks that hold some tensors alike, others not, with different neighbours and metadata."""
    ranks = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True))
    names = draw(st.lists(st.sampled_from(["a", "b", "c.d", "e", HEADER_TENSOR, "f"]), max_size=6, unique=True))
    found: dict[int, dict[str, tuple[bytes, Block | None]]] = {rank: {} for rank in ranks}
    for name in names:
        size = draw(st.sampled_from([0, 1, 7, 8, 100, 1024, 3000, 9000]))
        versions = draw(st.integers(1, 3))
        is_block = draw(st.booleans()) and size > 0
        for rank in draw(st.lists(st.sampled_from(ranks), unique=True)):
            version = draw(st.integers(1, versions))
            data = np.random.default_rng([size, version, names.index(name)]).bytes(size)
            block = Block((size * versions,), (size * (version - 1),)) if is_block else None
            found[rank][name] = (data, block)
    return {rank: found[rank] for rank in ranks}


@given(worlds(), st.lists(st.text(max_size=80), min_size=8, max_size=8), st.data())
def test_every_shard_is_put_together_from_files_that_have_nothing_twice(
    world: dict[int, Content], notes: list[str], data: st.DataObject
) -> None:
    made = {rank: shard(rank, content, notes[rank]) for rank, content in world.items()}
    shards, payloads = {r: held for r, (held, _) in made.items()}, {r: payload for r, (_, payload) in made.items()}
    found = planned(payloads, shards)
    assert found == planned(payloads, dict(reversed(shards.items()))), "whoever plans, plans the same"
    files = {rank: stored_file(part, payloads[rank]) for rank, part in found.parts.items()}
    kept: dict[int, dict[str, bytes]] = {}
    for rank, part in found.parts.items():
        assert len(files[rank]) == part.size_bytes == dict(part.layout.together.files)[rank]
        tensors = {name: value.tobytes() for name, value in load(files[rank]).items()}  # the library alone
        beginnings = [name for name in tensors if name.rstrip("'") == HEADER_TENSOR and name not in world[rank]]
        assert tensors.pop(beginnings[0]) == payloads[rank][: shards[rank].header.data_start]
        assert all(value == world[rank][name][0] for name, value in tensors.items()), "nothing in it is not the tensor"
        kept[rank] = tensors
        lines = stored_layout.as_file(manifests.encode(shards[rank].manifest), stored_layout.encode(part.layout))
        stored = stored_layout.read_file(lines, "file")
        assert stored.manifest == shards[rank].manifest and stored.layout == part.layout
        assert stored.file_size() == part.size_bytes
        reads = {member: MemorySource(memoryview(files[member])).read_into for member in part.layout.file_bytes}
        check_file_header(part.layout, reads[rank])
        whole = Composition(part.layout, reads)
        target = bytearray(len(payloads[rank]))
        whole.read_into(memoryview(target), 0)
        assert bytes(target) == payloads[rank]
        begin = data.draw(st.integers(0, len(target)))
        end = data.draw(st.integers(begin, len(target)))
        piece = bytearray(end - begin)
        whole.read_into(memoryview(piece), begin)
        assert bytes(piece) == payloads[rank][begin:end]
    large = [
        (name, content[0], content[1])
        for rank, tensors in world.items()
        for name, content in tensors.items()
        if rank in found.parts and len(content[0]) >= 8
    ]
    for name, value, block in large:
        same = [rank for rank in kept if world[rank].get(name) == (value, block)]
        assert sum(name in kept[rank] for rank in same) == 1, "stored by one of those that hold it"
    sharing = {
        rank
        for rank, other in itertools.permutations(world, 2)
        if any(len(c[0]) >= 8 and world[other].get(name) == c for name, c in world[rank].items())
    }
    assert set(found.parts) == sharing
    whole_bytes = sum(len(payloads[rank]) - shards[rank].header.data_start for rank in found.parts)
    file_bytes = sum(part.size_bytes - len(part.header) for part in found.parts.values())
    headers = sum(shards[rank].header.data_start for rank in found.parts)
    assert whole_bytes - (file_bytes - headers) == found.saved_bytes


@given(worlds(), st.lists(st.text(max_size=80), min_size=8, max_size=8), st.integers(0, 12))
def test_between_hosts_few_chunks_are_hashed_and_the_shards_are_put_together_all_the_same(
    world: dict[int, Content], notes: list[str], most: int
) -> None:
    made = {rank: shard(rank, content, notes[rank]) for rank, content in world.items()}
    shards, payloads = {r: held for r, (held, _) in made.items()}, {r: payload for r, (_, payload) in made.items()}
    hashed: dict[int, set[int]] = {}
    found = planned(payloads, shards, most, hashed)
    assert found == planned(payloads, dict(reversed(shards.items())), most), "whoever plans, plans the same"
    assert all(len(chunks) <= most for chunks in hashed.values())
    files = {rank: stored_file(part, payloads[rank]) for rank, part in found.parts.items()}
    for rank, part in found.parts.items():
        reads = {member: MemorySource(memoryview(files[member])).read_into for member in part.layout.file_bytes}
        target = bytearray(len(payloads[rank]))
        Composition(part.layout, reads).read_into(memoryview(target), 0)
        assert bytes(target) == payloads[rank]
    assert found.saved_bytes <= planned(payloads, shards).saved_bytes
    for odd in found.differing:
        for name in odd.tensors:
            assert len({world[rank][name][0] for rank in odd.agree}) <= 1
            assert len({world[rank][name][0] for rank in (*odd.agree, *odd.differ)}) > 1, "no false alarm"


def test_large_tensors_come_first_where_few_chunks_may_be_hashed() -> None:
    """Each rank has something of its own before and after what all have."""

    def content(rank: int) -> Content:
        own, same = np.random.default_rng([9, rank]), np.random.default_rng(1)
        large: dict[str, tuple[bytes, Block | None]] = {}
        for n in range(3):
            large[f"own{n}"] = (own.bytes(300), None)
            large[f"w{n}"] = (same.bytes(20_000), None)
        small = {f"small{n}": (same.bytes(100), None) for n in range(30)}
        return large | {"last": (own.bytes(300), None)} | small

    made = {rank: shard(rank, content(rank)) for rank in range(3)}
    shards, payloads = {r: held for r, (held, _) in made.items()}, {r: payload for r, (_, payload) in made.items()}
    hashed: dict[int, set[int]] = {}
    every = planned(payloads, shards, 100, hashed)
    assert every.saved_bytes == 2 * (3 * 20_000 + 30 * 100)
    needed = max(map(len, hashed.values()))
    assert planned(payloads, shards, needed).saved_bytes == every.saved_bytes
    assert 2 * 3 * 20_000 <= planned(payloads, shards, needed - 1).saved_bytes < every.saved_bytes
    none = planned(payloads, shards, 0)
    assert none.differing == () and none.undecided == (), "what was not compared is not reported"


def test_a_llama_of_7b_parameters_is_spread_over_sixteen_ranks_of_several_hosts() -> None:
    """Computed from manifests of that size; the bytes are not there."""
    hidden, wide, layers, words = 4096, 11008, 32, 32000
    shapes = {"embed": words * hidden, "head": words * hidden, "norm": hidden}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": hidden * hidden for name in "qkvo"}
        shapes |= {f"{layer}.{name}": hidden * wide for name in ("gate", "up", "down")}
        shapes |= {f"{layer}.{name}": hidden for name in ("norm1", "norm2")}
    tensors, offset = {}, 0
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        for name, count in shapes.items():
            tensors[f"{kind}.{name}"] = TensorHeader("F32", (count,), (offset, offset + 4 * count))
            offset += 4 * count
    header = shard_format.ShardHeader({}, tensors, {}, 1 << 18)
    chunk_bytes = 1 << 20
    size_bytes = header.data_start + offset
    digests = np.random.default_rng(1).bytes(16 * -(-size_bytes // chunk_bytes))

    def held(rank: int) -> HeldShard:
        own = np.random.default_rng([2, rank]).bytes(16)  # the first chunk has the header, which is the rank's own
        manifest = msgspec.structs.replace(
            _manifest(),
            rank=rank,
            world_size=16,
            payload_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            chunk_digests=own + digests[16:],
        )
        return HeldShard(header, manifest, f"{rank:032x}")

    found = plan({rank: held(rank) for rank in range(16)}, lambda *_: b"the same", most_hashed_chunks=32)
    sizes = [part.size_bytes for part in found.parts.values()]
    assert len(sizes) == 16
    assert max(sizes) / (sum(sizes) / 16) <= 1.05
    assert sum(sizes) / size_bytes <= 1.001


def test_bytes_are_spread_over_those_that_hold_them() -> None:
    content: Content = {f"w{n}": (np.random.default_rng(n).bytes(10_000 + 100 * n), None) for n in range(40)}
    made = {rank: shard(rank, content) for rank in range(4)}
    found = planned({r: payload for r, (_, payload) in made.items()}, {r: held for r, (held, _) in made.items()})
    sizes = [part.size_bytes for part in found.parts.values()]
    assert max(sizes) / (sum(sizes) / 4) < 1.05
    assert sum(sizes) < 1.1 * len(made[0][1])


def test_the_rank_that_differs_from_most_is_named_and_keeps_its_own() -> None:
    same, other = np.random.default_rng(1).bytes(5000), bytearray(np.random.default_rng(1).bytes(5000))
    other[4000] ^= 1
    made = {rank: shard(rank, {"w": (bytes(other) if rank == 2 else same, None)}) for rank in range(4)}
    found = planned({r: payload for r, (_, payload) in made.items()}, {r: held for r, (held, _) in made.items()})
    (odd,) = found.differing
    assert (odd.tensors, odd.agree, odd.differ) == (("w",), (0, 1, 3), (2,))
    assert set(found.parts) == {0, 1, 3}


@pytest.mark.parametrize(("is_block", "is_told"), [(True, True), (False, False)])
def test_two_that_differ_are_named_only_if_they_hold_the_same_block(is_block: bool, is_told: bool) -> None:
    """Plain tensors of two ranks may be their own: a random generator's state, for example."""
    block = Block((8000,), (4000,)) if is_block else None
    made = {rank: shard(rank, {"w": (np.random.default_rng(rank).bytes(4000), block)}) for rank in range(2)}
    found = planned({r: payload for r, (_, payload) in made.items()}, {r: held for r, (held, _) in made.items()})
    assert [odd.differ for odd in found.differing] == ([(0, 1)] if is_told else [])
    assert found.parts == {}


def test_blocks_at_different_places_are_no_replicas() -> None:
    same = np.random.default_rng(1).bytes(4000)
    made = {rank: shard(rank, {"w": (same, Block((8000,), (4000 * rank,)))}) for rank in range(2)}
    assert planned({r: p for r, (_, p) in made.items()}, {r: h for r, (h, _) in made.items()}).parts == {}


def _manifest(payload_bytes: int = 100) -> Manifest:
    held, payload = shard(1, {"w": (b"x" * payload_bytes, None)}, world_size=3)
    assert len(payload) == held.manifest.payload_bytes
    return held.manifest


GOOD_PLAN = "0" * 32


@pytest.mark.parametrize(
    ("files", "extents", "plan_digest", "version"),
    [
        (((1, 500),), [], GOOD_PLAN, 1),
        (((1, 500),), [Extent(10, 1, 0)], GOOD_PLAN, 1),
        (((1, 500),), [Extent(1 << 62, 1, 0), Extent(1 << 62, 1, 0)], GOOD_PLAN, 1),
        (((1, 500),), [(-5, 1, 0)], GOOD_PLAN, 1),
        (((1, 500),), [(0, 1, 0)], GOOD_PLAN, 1),
        (((1, 500),), ["ALL@1"], GOOD_PLAN, 1),  # outside of the file
        (((1, 500),), ["ALL@0 of 0"], GOOD_PLAN, 1),  # of a rank without a file
        (((0, 500),), ["ALL@0 of 0"], GOOD_PLAN, 1),  # the rank itself is no member
        (((1, 500), (0, 500)), ["ALL@0"], GOOD_PLAN, 1),
        (((1, 500), (1, 500)), ["ALL@0"], GOOD_PLAN, 1),
        (((1, 500), (3, 500)), ["ALL@0"], GOOD_PLAN, 1),  # there is no rank 3
        (((1, 500),), ["ALL@0"], "../" + "0" * 29, 1),
        (((1, 500),), ["ALL@0"], GOOD_PLAN, 2),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    files: tuple[tuple[int, int], ...], extents: list[object], plan_digest: str, version: int
) -> None:
    manifest = _manifest()
    size = manifest.payload_bytes
    spelled: dict[object, object] = {
        "ALL@0": (size, 1, 0),
        "ALL@1": (size, 1, 500 - size + 1),
        "ALL@0 of 0": (size, 0, 0),
    }
    shown = [spelled.get(extent, extent) if isinstance(extent, str) else extent for extent in extents]
    data = msgspec.json.encode({"version": version, "together": [plan_digest, files], "extents": shown})
    with pytest.raises(CorruptShard):
        stored_layout.decode(data, manifest)


@pytest.mark.parametrize(
    ("version", "header", "size_bytes"),
    [
        *((1, (100, GOOD_PLAN), 500), (2, (501, GOOD_PLAN), 500), (2, (0, GOOD_PLAN), 500), (2, (9, "x" * 32), 500)),
        (2, (100, GOOD_PLAN), 0),  # no byte is in the rank's own file
    ],
)
def test_a_checksum_of_a_header_that_does_not_fit_is_refused(
    version: int, header: tuple[int, str], size_bytes: int
) -> None:
    manifest = _manifest()
    owner = 1 if size_bytes else 0
    files = ((0, 500), (1, 500))
    extents = [Extent(manifest.payload_bytes, owner, 0)]
    data = {"version": version, "together": [GOOD_PLAN, files], "extents": extents, "header": header}
    with pytest.raises(CorruptShard):
        stored_layout.decode(msgspec.json.encode(data), manifest)
    right = data | {"version": 2, "header": (100, GOOD_PLAN), "extents": [Extent(manifest.payload_bytes, 1, 0)]}
    assert stored_layout.decode(msgspec.json.encode(right), manifest).header == FileHeader(100, GOOD_PLAN)


def test_every_flipped_byte_of_a_manifest_file_with_a_layout_is_found() -> None:
    manifest = _manifest()
    together = StoredTogether(GOOD_PLAN, ((1, 500),))
    layout = StoredLayout(2, together, (Extent(manifest.payload_bytes, 1, 0),), FileHeader(100, GOOD_PLAN))
    lines = stored_layout.as_file(manifests.encode(manifest), stored_layout.encode(layout))
    assert stored_layout.read_file(lines, "m").layout == layout
    for at in range(len(lines)):
        bad = bytearray(lines)
        bad[at] ^= 1
        with pytest.raises(CorruptShard):
            stored_layout.read_file(bytes(bad), "m")
    whole = len(stored_layout.as_file(manifests.encode(manifest), b""))
    for length in set(range(len(lines))) - {whole}:
        with pytest.raises(CorruptShard):
            stored_layout.read_file(lines[:length], "m")
