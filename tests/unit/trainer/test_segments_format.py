from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_with_the_library

from ckpt_engine.format import integrity, manifest, shard_format
from flyball.contracts.errors import CorruptShard


def shard(values: int = 5000) -> memoryview:
    return memoryview(bytearray(save_with_the_library({"a": np.arange(values), "b": np.zeros((2, 3), np.float32)})))


def described(payload: memoryview, chunk_bytes: int = 4096) -> manifest.Manifest:
    return manifest.describe(
        payload, job="job", generation=2, step=9, rank=1, world_size=4, code_version="1", chunk_bytes=chunk_bytes
    )


def test_a_manifest_describes_a_shard_of_the_safetensors_library_and_survives_encoding() -> None:
    payload = shard()
    made = described(payload)
    assert manifest.decode(manifest.encode(made)) == made
    entries = manifest.entries_of(shard_format.read_header(payload))
    assert {(t.fqn, t.dtype, t.shape) for t in entries} == {("a", "I64", (5000,)), ("b", "F32", (2, 3))}
    assert made.tensor_count == 2
    tensor = next(t for t in entries if t.fqn == "a")
    begin, end = tensor.byte_range
    assert np.frombuffer(payload[begin:end], np.int64).tolist() == list(range(5000))


@settings(deadline=None)
@given(size=st.integers(1, 300), chunk_bytes=st.integers(1, 64), data=st.data())
def test_every_flipped_bit_is_found(size: int, chunk_bytes: int, data: st.DataObject) -> None:
    payload = memoryview(bytearray(data.draw(st.binary(min_size=size, max_size=size))))
    digests = integrity.chunk_digests(payload, chunk_bytes)
    integrity.verify(payload, digests, chunk_bytes)
    at = data.draw(st.integers(0, size - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptShard, match=f"Chunk {at // chunk_bytes} "):
        integrity.verify(payload, digests, chunk_bytes)


def test_checksums_of_another_length_do_not_fit() -> None:
    payload = shard()
    with pytest.raises(CorruptShard, match="do not fit"):
        integrity.verify(payload, b"\0" * 16, 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"chunk_digests": b"\0" * 15},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"payload_bytes": -1},
        {"payload_bytes": 10},
        {"job": "../etc"},
        {"step": -1},
        {"rank": -1},
        {"world_size": 0},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(described(shard())) | change
    with pytest.raises(CorruptShard):
        manifest.decode(msgspec.json.encode(fields))


def of_version_2(made: manifest.Manifest) -> manifest.Manifest:
    """As written by releases that repeated the shard's header."""
    return msgspec.structs.replace(made, version=2, tensor_count=0)


def test_a_manifest_that_lists_the_tensors_is_still_read() -> None:
    payload = shard()
    entries = manifest.entries_of(shard_format.read_header(payload))
    old = msgspec.structs.replace(of_version_2(described(payload)), tensors=entries)
    found = manifest.decode(manifest.encode(old))
    assert (found.tensors, found.tensor_count) == (entries, 2)
    assert found.chunk_digests == described(payload).chunk_digests


def shard_of_many(tensors: int, step: int = 0) -> memoryview:
    """Tensors of one byte each."""
    names = (f"model.layers.{index // 40}.block.{index % 40}.attention.projection.weight" for index in range(tensors))
    entries = {name: shard_format.TensorHeader("U8", (1,), (at, at + 1)) for at, name in enumerate(names)}
    header = shard_format.join_header({"step": str(step)}, shard_format.encode_tensors(entries))
    payload = memoryview(bytearray(8 + len(header) + tensors))
    shard_format.write_header(payload, header, len(header))
    return payload


def test_a_manifest_does_not_grow_with_the_number_of_tensors() -> None:
    payload = shard_of_many(200_000)
    made = described(payload, chunk_bytes=1 << 20)
    data = manifest.encode(made)
    assert len(data) < 2000
    assert manifest.decode(data) == made
    assert made.tensor_count == 200_000


def test_a_structure_that_is_known_is_not_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known = shard_format.KnownStructures()
    assert known.count_tensors(shard_of_many(100)) == 100
    with monkeypatch.context() as patched:
        patched.setattr(shard_format, "_parse", lambda *_: pytest.fail("the step changes the metadata only"))
        assert known.count_tensors(shard_of_many(100, step=7)) == 100
    assert known.count_tensors(shard_of_many(99, step=8)) == 99
    with pytest.raises(CorruptShard, match="the file has 101"):
        known.count_tensors(memoryview(bytes(shard_of_many(100)) + b"\0"))


ENTRY = manifest.TensorEntry("x", "F32", (2, 3), (2, 3), (0, 0), (8, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"byte_range": (1 << 30, (1 << 30) + 24)}, "outside the shard"),
        ({"byte_range": (32, 8)}, "outside the shard"),
        ({"byte_range": (8, 33)}, "25 bytes"),
        ({"shape": (2, 4), "global_shape": (2, 4)}, "24 bytes"),
        ({"dtype": "F64"}, "24 bytes"),
        ({"dtype": "F99"}, "'F99'"),
        ({"shape": (1 << 62,) * 65}, "65 dimensions"),
        ({"global_shape": (2, 2)}, "part of"),
        ({"offsets": (0, 1)}, "part of"),
        ({"offsets": (0,)}, "part of"),
        ({"global_shape": (2, 3, 1)}, "part of"),
    ],
)
def test_a_tensor_that_cannot_be_where_the_manifest_says_is_refused(change: dict[str, Any], message: str) -> None:
    made = of_version_2(described(shard()))
    manifest.decode(manifest.encode(msgspec.structs.replace(made, tensors=(ENTRY,))))
    entry = msgspec.structs.replace(ENTRY, **change)
    with pytest.raises(CorruptShard, match=message):
        manifest.decode(manifest.encode(msgspec.structs.replace(made, tensors=(entry,))))


def test_a_tensor_that_is_named_twice_is_refused() -> None:
    with pytest.raises(CorruptShard, match="twice"):
        manifest.decode(
            manifest.encode(msgspec.structs.replace(of_version_2(described(shard())), tensors=(ENTRY, ENTRY)))
        )


def sharded(block: str) -> memoryview:
    """A shard with rows 4..6 of a matrix, placed by `block`."""
    tensors = {"w": shard_format.TensorHeader("U8", (2, 3), (0, 6))}
    header = shard_format.join_header({shard_format.SHARDING_KEY: block}, shard_format.encode_tensors(tensors))
    payload = memoryview(bytearray(8 + len(header) + 6))
    shard_format.write_header(payload, header, len(header))
    return payload


def test_the_header_says_which_block_of_a_sharded_tensor_it_is() -> None:
    block = shard_format.Block((9, 3), (4, 0))
    (entry,) = manifest.entries_of(shard_format.read_header(sharded(shard_format.encode_blocks({"w": block}))))
    assert (entry.shape, entry.global_shape, entry.offsets) == ((2, 3), (9, 3), (4, 0))


@pytest.mark.parametrize(
    "block",
    [
        '{"w":{"global_shape":[9,3],"offsets":[8,0]}}',
        '{"w":{"global_shape":[9],"offsets":[0]}}',
        '{"w":{"global_shape":[9,3],"offsets":[-1,0]}}',
        '{"other":{"global_shape":[9,3],"offsets":[0,0]}}',
        "[]",
    ],
)
def test_a_block_outside_of_its_tensor_is_refused(block: str) -> None:
    with pytest.raises(CorruptShard):
        described(sharded(block))


def test_a_header_that_is_nested_without_end_is_refused() -> None:
    header = b'{"a":' + b"[" * 100_000
    with pytest.raises(CorruptShard, match="parse"):
        shard_format.read_header(memoryview(len(header).to_bytes(8, "little") + header))
    with pytest.raises(CorruptShard, match="parse"):
        manifest.decode(header)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_no_manifest_and_no_shard(data: bytes) -> None:
    with pytest.raises(CorruptShard):
        manifest.decode(data)
    with pytest.raises(CorruptShard):
        shard_format.read_header(memoryview(data))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_a_header_of_garbage_is_refused(header: bytes) -> None:
    with pytest.raises(CorruptShard):
        shard_format.read_header(memoryview(len(header).to_bytes(8, "little") + header + b"rest"))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (((0, 8), (9, 16)), "expected from 8"),  # a gap
        (((0, 8), (4, 16)), "expected from 8"),  # an overlap
        (((0, 8), (8, 12)), "the file has 16"),  # bytes of no tensor
        (((0, 8), (8, 99)), "the file has 16"),  # beyond the end
        (((4, 8), (8, 16)), "expected from 0"),
        (((8, 0), (0, 16)), "expected from"),
    ],
)
def test_tensors_must_fill_the_file_exactly(offsets: tuple[tuple[int, int], ...], message: str) -> None:
    tensors = {
        f"t{i}": shard_format.TensorHeader("U8", (abs(pair[1] - pair[0]),), pair) for i, pair in enumerate(offsets)
    }
    header = shard_format.join_header({}, shard_format.encode_tensors(tensors))
    payload = memoryview(bytearray(8 + len(header) + 16))
    shard_format.write_header(payload, header, len(header))
    with pytest.raises(CorruptShard, match=message):
        shard_format.read_header(payload)


def test_a_manifest_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = described(shard())
    data = manifest.encode(made)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CorruptShard, match="exceeds"):
        manifest.decode(data)
    with pytest.raises(CorruptShard, match="limit"):
        manifest.encode(made)
