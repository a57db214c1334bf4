"""The manifest of a whole step in storage that all hosts share: written last, once every rank's shard is there. Pure.

A step without one does not count there, so nobody takes half a step for a recovery point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ckpt_engine.format.versions import refuse_newer
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import CorruptShard
from flyball.contracts.identity import MAX_GENERATIONS, JobName, RunId, SizeBytes, Step
from flyball.contracts.wire import MALFORMED, decoder_of

WORLD_MANIFEST = "world.manifest"
WORLD_MANIFEST_VERSION = 2


class WorldManifest(msgspec.Struct, frozen=True):
    """One step of one generation: each rank's manifest digest (as in ShardCopy.digest) and shard size. So a single
    object lists all copies of a step."""

    version: int
    job: JobName
    generation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GENERATIONS)]
    step: Step
    digests: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...]
    sizes: tuple[SizeBytes, ...] = ()  # version 1 had none
    run: RunId = ""

    def names(self, rank: int, digest: str) -> bool:
        """Whether this shard belongs to the step."""
        return 0 <= rank < len(self.digests) and self.digests[rank] == digest

    def copy(self, rank: int, tier: Tier) -> ShardCopy:
        """The inventory entry for a rank's shard in shared storage."""
        return ShardCopy(self.job, self.generation, self.step, rank, tier, "", self.sizes[rank], self.digests[rank])


_encoder = msgspec.json.Encoder()
_decoder = decoder_of(WorldManifest)


def describe(job: str, generation: int, step: int, shards: Sequence[tuple[str, int]], *, run: str = "") -> bytes:
    """The encoded manifest; `shards` has (digest, size in bytes) per rank."""
    digests, sizes = tuple(digest for digest, _ in shards), tuple(size_bytes for _, size_bytes in shards)
    return _encoder.encode(WorldManifest(WORLD_MANIFEST_VERSION, job, generation, step, digests, sizes, run))


def decode(data: bytes, *, job: str, generation: int, step: int, run: str = "") -> WorldManifest:
    """Decode the manifest. Raises CorruptShard unless it describes this step."""
    try:
        manifest = _decoder.decode(data)
    except MALFORMED as error:
        raise CorruptShard(f"A world manifest does not parse: {error}.") from error
    refuse_newer("A world manifest", manifest.version, WORLD_MANIFEST_VERSION)
    if manifest.version != WORLD_MANIFEST_VERSION:
        raise CorruptShard(
            f"A world manifest has version {manifest.version}, this release reads {WORLD_MANIFEST_VERSION}.",
            hint="restore with the release that wrote it",
        )
    described = (manifest.job, manifest.run, manifest.generation, manifest.step)
    if described != (job, run, generation, step):
        raise CorruptShard(f"A world manifest describes {described}.", hint="another recovery point is used")
    if len(manifest.digests) != len(manifest.sizes):
        raise CorruptShard(f"A world manifest has {len(manifest.digests)} digests and {len(manifest.sizes)} sizes.")
    return manifest
