"""Maliciously made shards with valid manifests and checksums but wrong content. They cause a clear error, no stray
writes, and no allocation of a size that they claim."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.shards import make_manifest

from ckpt_engine.format import integrity, shard_format, world_manifest
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.restore.load_shard import read_state, restore_into
from flyball.contracts.errors import CorruptShard, FlyballError, StateMismatch

ROOT = Path(__file__).parents[2]
MAX_BYTES = 16 << 20  # for reading any small shard

DEEP = "[" * 100_000 + "]" * 100_000
U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
META = {"__metadata__": {"flyball.format": "1", "flyball.state": "{}"}}


def shard_of(header: str | bytes | dict[str, Any], data: bytes = bytes(4), *, length: int | None = None) -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(**changes: object) -> dict[str, Any]:
    return {"a": {**U8, **changes}}


def sharding(**blocks: object) -> dict[str, Any]:
    return {"__metadata__": {"flyball.sharding": json.dumps(blocks)}}


HEADERS = {
    "no bytes": b"",
    "seven bytes": bytes(7),
    "length of nothing": shard_of("", b""),
    "length beyond the file": shard_of("{}", length=7),
    "length of 2**63": shard_of("{}", length=1 << 63),
    "length of 2**64 - 1": shard_of("{}", length=(1 << 64) - 1),
    "length that wraps": shard_of("{}", length=(1 << 64) - 8),
    "length of the limit": shard_of("{}", length=100_000_000),
    "not JSON": shard_of("not JSON"),
    "half of it": shard_of('{"a":{"dtype":"U8"'),
    "more behind it": shard_of(json.dumps({"a": U8}) + "{}"),
    "a list": shard_of("[]"),
    "null": shard_of("null"),
    "no UTF-8": shard_of(b'{"a\xff":' + json.dumps(U8).encode() + b"}"),
    "no UTF-8 in the metadata": shard_of(b'{"__metadata__":{"a":"\xff"},"a":' + json.dumps(U8).encode() + b"}"),
    "half a surrogate pair": shard_of('{"__metadata__":{"a":"\\ud800"}}', b""),
    "deep": shard_of(DEEP, b""),
    "deep tensor": shard_of('{"a":' + DEEP + "}"),
    "deep metadata": shard_of('{"__metadata__":{"a":' + DEEP + "}}", b""),
    "deep sharding": shard_of({"__metadata__": {"flyball.sharding": '{"a":{"x":' + DEEP + "}}"}, "a": U8}),
    "metadata that is no string": shard_of({"__metadata__": {"flyball.state": {}}, "a": U8}),
    "metadata that is a list": shard_of({"__metadata__": [], "a": U8}),
    "overlap": shard_of({"a": U8, "b": {**U8, "data_offsets": [2, 6]}}, bytes(6)),
    "twice the same bytes": shard_of({"a": U8, "b": U8}),
    "a gap": shard_of({"a": U8, "b": {**U8, "data_offsets": [6, 10]}}, bytes(10)),
    "a gap at the begin": shard_of(tensor(data_offsets=[2, 6]), bytes(6)),
    "bytes of nobody": shard_of({"a": U8}, bytes(5)),
    "bytes that are missing": shard_of({"a": U8}, bytes(3)),
    "negative offsets": shard_of(tensor(data_offsets=[-4, 0])),
    "backwards": shard_of(tensor(data_offsets=[4, 0])),
    "offsets of 2**63": shard_of(tensor(data_offsets=[1 << 63, (1 << 63) + 4])),
    "offsets of 5000 digits": shard_of('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,' + "9" * 5000 + "]}}"),
    "one offset": shard_of(tensor(data_offsets=[4])),
    "three offsets": shard_of(tensor(data_offsets=[0, 4, 4])),
    "offsets with a fraction": shard_of(tensor(data_offsets=[0.5, 4])),
    "offsets in text": shard_of(tensor(data_offsets=["0", "4"])),
    "a negative size": shard_of(tensor(shape=[-4])),
    "two negative sizes": shard_of(tensor(shape=[-2, -2])),
    "a huge shape": shard_of(tensor(shape=[1 << 62, 1 << 62])),
    "a huge shape that wraps to its size": shard_of(tensor(shape=[1 << 32, 1 << 32, 4])),
    "NaN as a size": shard_of('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}'),
    "infinity as a size": shard_of('{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,4]}}'),
    "1e999 as a size": shard_of('{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}'),
    "65 dimensions": shard_of(tensor(shape=[1] * 64 + [4])),
    "an unknown dtype": shard_of(tensor(dtype="O8")),
    "a dtype of another size": shard_of(tensor(dtype="F32")),
    "a dtype in another case": shard_of(tensor(dtype="u8")),
    "a dtype that is a number": shard_of(tensor(dtype=8)),
    "a field that is not known": shard_of(tensor(pickle="gASV")),
    "a field that is missing": shard_of({"a": {"dtype": "U8", "shape": [4]}}),
    "a block of no tensor": shard_of(
        {"__metadata__": {"flyball.sharding": '{"b":{"global_shape":[4],"offsets":[0]}}'}}
    ),
    "a block outside": shard_of(
        {"__metadata__": {"flyball.sharding": '{"a":{"global_shape":[4],"offsets":[1]}}'}, "a": U8}
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_an_error_and_costs_no_memory(name: str) -> None:
    payload = HEADERS[name]
    with pytest.raises(CorruptShard):
        shard_format.read_header(memoryview(payload))
    with pytest.raises(CorruptShard):
        make_manifest(payload, 3)
    manifest = manifest_of(payload)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptShard):
            restore_into({"a": torch.zeros(4, dtype=torch.uint8)}, MemorySource(memoryview(payload)), manifest)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def manifest_of(payload: bytes, chunk_bytes: int = 1 << 20) -> manifests.Manifest:
    """With valid checksums of any content."""
    digests = integrity.chunk_digests(memoryview(payload), chunk_bytes)
    return manifests.Manifest(2, "test", "job", 1, 3, 0, 1, len(payload), chunk_bytes, digests, ())


@pytest.mark.parametrize(
    "shape", [[0, 1 << 62, 1 << 62], [0, 99999999999999999999999], [1 << 40, 0], [0] * 64], ids=str
)
def test_dimensions_of_nothing_are_nothing_or_an_error(shape: list[int]) -> None:
    tree = {"__metadata__": {"flyball.format": "1", "flyball.state": '{"a":{"$tensor":"a"}}'}}
    payload = shard_of({**tree, "a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}, b"")
    try:
        found = read_state(MemorySource(memoryview(payload)), manifest_of(payload))
    except CorruptShard:
        return
    assert list(found["a"].shape) == shape


def test_names_twice_are_read_as_one_tensor_that_fills_the_file() -> None:
    """Of two entries with one name the last counts, as in JSON readers; the rest must still be contiguous."""
    twice = shard_of('{"a":' + json.dumps(U8) + ',"a":' + json.dumps({**U8, "dtype": "I8"}) + "}")
    assert shard_format.read_header(memoryview(twice)).tensors["a"].dtype == "I8"
    with pytest.raises(CorruptShard):
        shard_format.read_header(
            memoryview(shard_of('{"a":' + json.dumps(U8) + ',"a":' + json.dumps({**U8, "shape": [3]}) + "}"))
        )


# --- the tree of the state ---

TREES = [
    "",
    "[]",
    "null",
    "{",
    '{"a":' + DEEP + "}",
    '{"a":' + "9" * 5000 + "}",
    '{"a":{"$tensor":"b"}}',
    '{"a":{"$tensor":[]}}',
    '{"a":{"$tensor":null}}',
    '{"a":{"$complex_tensor":"a"}}',
    '{"a":{"$complex_tensor":"b"}}',
    '{"a":{"$array":"b"}}',
    '{"a":{"$pickle":"gASV"}}',
    '{"a":{"$":1}}',
    '{"a":{"$import":"os"}}',
    '{"a":{"$device":"a host in the cloud"}}',
    '{"a":{"$device":7}}',
    '{"a":{"$dtype":"load"}}',
    '{"a":{"$dtype":"__builtins__"}}',
    '{"a":{"$numpy":["O","AAAAAAAAAAA="]}}',
    '{"a":{"$numpy":["|O8","AAAAAAAAAAA="]}}',
    '{"a":{"$numpy":[{"names":["x"],"formats":["O"]},"AAAAAAAAAAA="]}}',
    '{"a":{"$numpy":["(1,","AAAA"]}}',
    '{"a":{"$numpy":["i4",""]}}',
    '{"a":{"$numpy":["i4"]}}',
    '{"a":{"$numpy":["U1000000000","AAAA"]}}',
    '{"a":{"$numpy":["(1000000000,)i8","AAAA"]}}',
    '{"a":{"$numpy":{}}}',
    '{"a":{"$size":["x"]}}',
    '{"a":{"$complex":["x","y"]}}',
    '{"a":{"$complex":[1,2,3]}}',
    '{"a":{"$float":[]}}',
    '{"a":{"$float":1' + "0" * 400 + "}}",
    '{"a":{"$bytes":"?"}}',
    '{"a":{"$set":[[1]]}}',
    '{"a":{"$dict":[[[1],2]]}}',
    '{"a":{"$ordered":5}}',
    '{"a":{"$tuple":null}}',
    '{"a":{"$dtensor":5}}',
    '{"a":{"$dtensor":{}}}',
    '{"a":{"$dtensor":{"local":{"$array":"a"}}}}',
    '{"a":{"$dtensor":{"local":{"$tensor":"a","$array":"a"}}}}',
]


def of_tree(tree: str) -> tuple[MemorySource, manifests.Manifest]:
    payload = shard_of({"__metadata__": {"flyball.format": "1", "flyball.state": tree}, "a": U8})
    return MemorySource(memoryview(payload)), manifest_of(payload)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree[:60])
def test_a_hostile_tree_is_corrupt(tree: str) -> None:
    with pytest.raises((CorruptShard, StateMismatch)):
        restore_into({"a": torch.zeros(4, dtype=torch.uint8)}, *of_tree(tree))
    with pytest.raises(CorruptShard):
        read_state(*of_tree(tree))


def test_an_unknown_format_names_the_release_that_is_needed() -> None:
    payload = shard_of({"__metadata__": {"flyball.format": "99", "flyball.state": "{}"}, "a": U8})
    with pytest.raises(CorruptShard, match=r"format 99.*reads up to 2"):
        read_state(MemorySource(memoryview(payload)), manifest_of(payload))


LEAVES = st.sampled_from(
    ['"a"', '"b"', "0", "-1", "1.5", "1e400", "null", "true", "[]", "{}", '""', '"cpu"', '"i4"', '"AAAA"', "NaN"]
)
TAGS = st.sampled_from(
    [
        *("$tensor", "$array", "$complex_tensor", "$tuple", "$set", "$dict", "$ordered", "$size", "$float", "$complex"),
        *("$bytes", "$dtype", "$device", "$numpy", "$dtensor", "$metadata", "$namedtuple", "$fields", "$enum"),
        *("$frozenset", "$deque", "$maxlen", "$defaultdict", "$factory", "$path", "$datetime", "$range", "$view"),
        *("$strided", "$parameter", "$other", "state", "param_groups", "params", "0", "local"),
    ]
)


def nodes(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
    objects = st.lists(st.tuples(TAGS, inner), max_size=3).map(
        lambda pairs: "{" + ",".join(f'"{tag}":{node}' for tag, node in pairs) + "}"
    )
    return lists | objects


TARGETS: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.zeros(4, dtype=torch.uint8),
    "module": lambda: torch.nn.Linear(2, 2),
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.9),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(2)], lr=1.0), 2),
    "dict": lambda: {"state": {"0": 1}, "params": [torch.zeros(4, dtype=torch.uint8)]},
    "list": lambda: [1, {"a": (2,)}],
    "number": lambda: 5,
}


@pytest.mark.parametrize("target", TARGETS)
@settings(deadline=None, max_examples=150)
@given(node=st.recursive(LEAVES, nodes, max_leaves=8))
def test_any_tree_is_loaded_or_an_error_of_ours(target: str, node: str) -> None:
    source, manifest = of_tree(f'{{"x":{node}}}')
    try:
        restore_into({"x": TARGETS[target]()}, source, manifest)
    except FlyballError:
        return


# --- manifests ---


def manifest_json(**changes: object) -> bytes:
    known = json.loads(manifests.encode(manifest_of(shard_of({"a": U8}))))
    return json.dumps({**known, **changes}).encode()


ENTRY = {"fqn": "a", "dtype": "U8", "shape": [4], "global_shape": [4], "offsets": [0], "byte_range": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b'{"version":2,"code_version":"\xff"}',
        b'{"version":2,"x":' + DEEP.encode() + b"}",
        DEEP.encode(),
        manifest_json(payload_bytes=1 << 62),
        manifest_json(payload_bytes=-1),
        manifest_json(payload_bytes=1 << 62, chunk_bytes=1),
        manifest_json(chunk_bytes=0),
        manifest_json(chunk_bytes=1 << 62),
        manifest_json(chunk_digests="?"),
        manifest_json(chunk_digests="AAAA"),
        manifest_json(job="../../etc"),
        manifest_json(job="a\0b"),
        manifest_json(step=-1),
        manifest_json(rank=-1),
        manifest_json(world_size=0),
        manifest_json(version=1),
        manifest_json(version="2"),
        manifest_json(version=5),
        manifest_json(version=2, tensors=[ENTRY, ENTRY]),
        manifest_json(version=2, tensors=[{**ENTRY, "shape": [1 << 62, 1 << 62]}]),
        manifest_json(version=2, tensors=[{**ENTRY, "byte_range": [0, 1 << 62]}]),
        manifest_json(version=2, tensors=[{**ENTRY, "byte_range": [4, 0]}]),
        manifest_json(version=2, tensors=[{**ENTRY, "offsets": [1 << 62]}]),
        manifest_json(version=2, tensors=[{**ENTRY, "dtype": "O"}]),
    ],
    ids=range(28),
)
def test_a_hostile_manifest_is_corrupt_and_costs_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptShard):
            manifests.decode(data)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b'{"version":1,"job":"\xff"}', b'{"version":1,"x":' + DEEP.encode() + b"}", b"[]", b"null"],
    ids=range(6),
)
def test_a_hostile_world_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptShard):
        world_manifest.decode(data, job="job", generation=1, step=3)


def test_a_world_manifest_of_another_release_is_reported_as_such() -> None:
    older = b'{"version":1,"job":"job","generation":1,"step":3,"digests":["d"],"run":""}'
    with pytest.raises(CorruptShard, match="version 1, this release reads 2"):
        world_manifest.decode(older, job="job", generation=1, step=3)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_no_damage_of_a_manifest_or_a_header_is_anything_but_corrupt(data: st.DataObject) -> None:
    """Without the checksums that would have detected it earlier."""
    payload = shard_of({**META, "a": U8, "b": {**U8, "data_offsets": [4, 8]}}, bytes(8))
    for content, decode in (
        (manifests.encode(manifest_of(payload)), manifests.decode),
        (payload, lambda changed: shard_format.read_header(memoryview(changed))),
    ):
        changed = bytearray(content)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(changed) - 1))
            changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        try:
            decode(bytes(changed))
        except CorruptShard:
            continue


HUGE_CLAIMS = """
import resource, sys
import torch
from ckpt_engine.format import manifest as manifests
from ckpt_engine.trainer.restore.load_shard import restore_into
from ckpt_engine.trainer.restore.load_shard import load_file
from flyball.contracts.errors import FlyballError

used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
for path in sys.argv[1:]:
    try:
        load_file(path, {"a": torch.zeros(4, dtype=torch.uint8)})
    except FlyballError as error:
        print(type(error).__name__)
"""


@pytest.mark.processes
def test_claims_of_terabytes_take_no_address_space(tmp_path: Path) -> None:
    """In a process limited to 256 MiB beyond torch: a MemoryError would end it."""
    sized = manifest_of(shard_of({"a": U8}))
    paths = []
    for name, payload, changes in (
        ("payload", shard_of({"a": U8}), {"payload_bytes": 1 << 40}),
        ("chunk", shard_of({"a": U8}), {"payload_bytes": 1 << 40, "chunk_bytes": 64 << 20}),
        ("header", shard_of("{}", length=99_999_999), {}),
        ("tensor", shard_of({**META, "a": {**U8, "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}), {}),
        ("tree", HEADERS["deep"], {}),
    ):
        manifest = msgspec.structs.replace(manifest_of(payload), **changes)
        chunks = -(-manifest.payload_bytes // manifest.chunk_bytes)
        if chunks > 1:
            manifest = msgspec.structs.replace(manifest, chunk_digests=sized.chunk_digests * min(chunks, 400_000))
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(payload)
        path.with_suffix(".manifest").write_bytes(manifests.as_file(msgspec.json.encode(manifest)))
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", HUGE_CLAIMS, *paths], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CorruptShard"] * len(paths)
