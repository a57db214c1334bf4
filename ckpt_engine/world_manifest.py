"""The manifest of a whole step in a folder that all hosts share: written last, when every rank's shard is there. Pure.

A step without one does not exist there, so that nobody takes half a step for a recovery point.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flyball.contracts.errors import CorruptShard
from flyball.contracts.identity import JobName, RunId, Step
from flyball.contracts.wire import MALFORMED

WORLD_MANIFEST = "world.manifest"
WORLD_MANIFEST_VERSION = 1


class WorldManifest(msgspec.Struct, frozen=True):
    """One step of one generation: the digest of each rank's manifest, as in ShardCopy.digest."""

    version: int
    job: JobName
    generation: Annotated[int, msgspec.Meta(ge=0)]
    step: Step
    digests: tuple[str, ...]  # by rank
    run: RunId = ""

    def names(self, rank: int, digest: str) -> bool:
        """Whether the step has this very shard."""
        return 0 <= rank < len(self.digests) and self.digests[rank] == digest


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(WorldManifest)


def describe(job: str, generation: int, step: int, digests: tuple[str, ...], *, run: str = "") -> bytes:
    """The manifest's bytes."""
    return _encoder.encode(WorldManifest(WORLD_MANIFEST_VERSION, job, generation, step, digests, run))


def decode(data: bytes, *, job: str, generation: int, step: int, run: str = "") -> WorldManifest:
    """Raises CorruptShard unless it is the manifest of this step."""
    try:
        manifest = _decoder.decode(data)
    except MALFORMED as error:
        raise CorruptShard(f"A world manifest does not parse: {error}.") from error
    described = (manifest.version, manifest.job, manifest.run, manifest.generation, manifest.step)
    if described != (WORLD_MANIFEST_VERSION, job, run, generation, step):
        raise CorruptShard(f"A world manifest describes {described}.", hint="another recovery point is used")
    return manifest
