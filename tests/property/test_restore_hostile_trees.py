"""Shards with right checksums but a wrong header or tree raise exactly the error that describes it."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.stores.shards import make_manifest
from torch import nn

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import LENGTH_BYTES, METADATA_KEY
from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capture_plan import STATE_KEY
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.restore.load_shard import read_state, restore_into
from flyball.contracts.errors import CorruptShard, StateMismatch

Shard = tuple[dict[str, Any], bytes, Manifest]
ROUNDS = 60
STRANGE: list[Any] = [
    *(0, -1, 2**31, 2**63, 10**30, 1.5, None, True, "", "x", [], {}, [0, 2**62], [2**40, 2**40], "F64", "BOOL", "BF16"),
    *({"$tensor": "model.weight"}, {"$array": "model.weight"}, {"$complex_tensor": "model.weight"}, {"$tensor": ["a"]}),
    *({"$dtensor": {"local": {"$tensor": "model.weight"}}}, {"$dtensor": {"local": {"$dtensor": {}}}}, {"$dtensor": 1}),
    *({"$numpy": ["O", "AAAA"]}, {"$numpy": ["<f4", ""]}, {"$dtype": "zeros"}, {"$device": "nope"}, {"$bytes": "!"}),
    *({"$set": [[1]]}, {"$size": ["a"]}, {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$complex": [1]}, {"$float": {}}),
    *({"$unknown": 1}, {"$tuple": 1}, {"$enum": "A"}, {"$enum": ["A"]}, {"$namedtuple": [1]}, {"$range": [1, 2, 0]}),
    *({"$ordered": [], "$metadata": [1]}, {"$deque": [1], "$maxlen": -1}, {"$defaultdict": [], "$factory": "eval"}),
    *({"$path": ["Path", "x"]}, {"$datetime": ["x", 0]}, {"$datetime": ["2026-01-01", 9]}, {"$timedelta": [1e300]}),
    *({"$view": ["model.weight", "float32", [9], [9], 9, False]}, {"$strided": 1}, {"$parameter": [[], True]}),
]


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    rest = [torch.zeros(3, dtype=torch.complex64), (1, 2), {1: "a"}, np.arange(3), np.float32(2), torch.zeros(0, 3)]
    return {"model": model, "optimizer": optimizer, "rest": rest, "flag": torch.ones(5, dtype=torch.bool)}


@pytest.fixture(scope="module")
def shard() -> Shard:
    """Header, data, manifest."""
    prepared = Capturer().take(training_state())
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    manifest = make_manifest(payload, generation=0)
    end = LENGTH_BYTES + int.from_bytes(payload[:LENGTH_BYTES], "little")
    return json.loads(bytes(payload[LENGTH_BYTES:end])), bytes(payload[end:]), manifest


def paths_in(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in children for found in paths_in(child, (*path, key)))]


def changed(value: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """`value` with something strange inserted, or a part removed."""
    *folder, last = chance.choice(paths_in(value)[1:])
    parent: Any = value
    for key in folder:
        parent = parent[key]
    if chance.random() < 0.8:
        parent[last] = copy.deepcopy(chance.choice(STRANGE))
    else:
        del parent[last]
    return value


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # torch, about its input
@pytest.mark.parametrize("seed", range(8))
def test_a_strange_tree_is_corrupt_or_of_another_state(
    shard: tuple[dict[str, Any], bytes, Manifest], seed: int
) -> None:
    chance = random.Random(seed)
    original, data, manifest = shard
    errors = 0
    for _ in range(ROUNDS):
        header = copy.deepcopy(original)
        if chance.random() < 0.7:
            tree = changed(json.loads(header[METADATA_KEY][STATE_KEY]), chance)
            header[METADATA_KEY][STATE_KEY] = json.dumps(tree)
        else:
            header = changed(header, chance)
        encoded = json.dumps(header).encode()
        payload = memoryview(bytearray(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded + data))
        digests = integrity.chunk_digests(payload, manifest.chunk_bytes)
        described = msgspec.structs.replace(manifest, payload_bytes=len(payload), chunk_digests=digests)
        try:
            read_state(MemorySource(payload), described)
            restore_into(training_state(), MemorySource(payload), described)
        except (CorruptShard, StateMismatch) as error:
            assert error.message
            errors += 1
    assert errors > ROUNDS / 2
