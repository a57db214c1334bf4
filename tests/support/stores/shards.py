"""Manifests of shards that tests make, and shards in slots."""

from __future__ import annotations

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.slots.rank_segments import RankSegments


def make_manifest(
    payload: bytes | bytearray | memoryview,
    step: int = 0,
    rank: int = 0,
    *,
    generation: int = 1,
    world_size: int = 1,
    job: str = "job",
    run: str = "",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Manifest:
    return manifests.describe(
        memoryview(payload),
        job=job,
        generation=generation,
        step=step,
        rank=rank,
        world_size=world_size,
        code_version="test",
        run=run,
        chunk_bytes=chunk_bytes,
    )


def put_in_slot(segments: RankSegments, slot: int, manifest: Manifest, payload: bytes, data: bytes = b"") -> None:
    """Write a shard as its trainer does, and commit it as its engine does. `data`: instead of the manifest's bytes."""
    segments.begin_write(slot, manifest.generation, manifest.step, len(payload))[:] = payload
    segments.mark_captured(slot)
    assert segments.commit(segments.control.slot(slot), data or manifests.encode(manifest))
