"""What a trainer and the engine beside it leave for each other in the folder of a step that is restored in another
layout. Pure.

    rank<R>.manifest, rank<R>.safetensors   of each rank that saved the step; the latter has only some chunks, or is a
                                            link to a whole copy on this host
    wanted-<rank>-<attempt>                 from the trainer of a rank: the chunks that it is about to read
    brought-<rank>-<attempt>                from the engine, empty: they are there

A trainer that reads something bad begins its next attempt. Every file gets its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ckpt_engine.format.chunk_runs import ChunkRun, runs_of
from flyball.contracts import wire
from flyball.contracts.identity import Rank

MAX_WANTED_BYTES = 32 << 20
MAX_ATTEMPTS = 4


class WantedShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks of the shard that `rank` saved."""

    rank: Rank
    runs: tuple[ChunkRun, ...]


class WantedChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All chunks that one rank needs, whether they are there or not."""

    shards: tuple[WantedShard, ...]


def wanted_name(rank: int, attempt: int) -> str:
    return f"wanted-{rank}-{attempt}"


def brought_name(rank: int, attempt: int) -> str:
    return f"brought-{rank}-{attempt}"


def encode_wanted(chunks: Mapping[int, Sequence[int]]) -> bytes:
    """Chunks by the rank that saved them, in order."""
    return wire.encode(WantedChunks(tuple(WantedShard(rank, tuple(runs_of(chunks[rank]))) for rank in sorted(chunks))))


def decode_wanted(data: bytes) -> WantedChunks:
    """Raises InvalidMessage."""
    return wire.decode(data, WantedChunks, max_bytes=MAX_WANTED_BYTES)
