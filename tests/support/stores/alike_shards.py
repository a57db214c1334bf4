"""Shards of ranks that hold much alike, made without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt_engine.format import shard_format
from ckpt_engine.format.shard_format import Block, TensorHeader

Tensors = Mapping[str, tuple[np.ndarray, Block | None]]


def ddp_state(
    step: int, rank: int, *, sizes: tuple[int, ...] = (400_000, 300_000, 300_000, 150_000, 50_000)
) -> Tensors:
    """Parameters that all ranks have, and a generator's state that each has for itself."""
    found: dict[str, tuple[np.ndarray, Block | None]] = {
        f"model.w{n}": (np.random.default_rng([step, n]).random(size, dtype=np.float32), None)
        for n, size in enumerate(sizes)
    }
    found["generator"] = (np.random.default_rng([step, 99, rank]).integers(0, 256, 5056, np.uint8), None)
    return found


def hsdp_state(step: int, rank: int) -> Tensors:
    """Two replicas of two shards: ranks 0 and 2 hold the same block, and so do 1 and 3."""
    half = rank % 2
    block = Block((1_000_000,), (500_000 * half,))
    return {
        "model.w": (np.random.default_rng([step, half]).random(500_000, dtype=np.float32), block),
        "model.v": (np.random.default_rng([step, 7, half]).random(500_000, dtype=np.float32), block),
    }


def as_payload(tensors: Tensors, note: str) -> bytes:
    entries, offset = {}, 0
    for name, (value, _) in tensors.items():
        kind = {np.dtype("float32"): "F32", np.dtype("uint8"): "U8"}[value.dtype]
        entries[name] = TensorHeader(kind, value.shape, (offset, offset + value.nbytes))
        offset += value.nbytes
    metadata = {"note": note}
    if blocks := {name: block for name, (_, block) in tensors.items() if block is not None}:
        metadata[shard_format.SHARDING_KEY] = shard_format.encode_blocks(blocks)
    header = shard_format.join_header(metadata, shard_format.encode_tensors(entries))
    payload = memoryview(bytearray(4096 + offset))
    shard_format.write_header(payload, header, 4088)
    payload[4096:] = b"".join(value.tobytes() for value, _ in tensors.values())
    return bytes(payload)
