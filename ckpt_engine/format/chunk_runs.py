"""Some chunks of a shard, as runs of neighbours: how peers and trainers ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from ckpt_engine.format.integrity import chunk_count
from ckpt_engine.format.manifest import Manifest

MAX_RUNS = 1024  # in one frame between engines
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
ChunkRun = tuple[_Number, _Number]  # the first chunk, and how many


def runs_of(chunks: Iterable[int]) -> list[ChunkRun]:
    """The runs that make up these chunks, which are in order and different."""
    runs: list[ChunkRun] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return runs


def chunks_of(runs: Sequence[ChunkRun], manifest: Manifest) -> list[int]:
    """The chunks in these runs. Raises ValueError unless they are in order, different, and in the shard."""
    _check(runs, manifest)
    return [chunk for first, count in runs for chunk in range(first, first + count)]


def byte_ranges(runs: Sequence[ChunkRun], manifest: Manifest) -> list[tuple[int, int]]:
    """(offset, bytes) of each run in the shard. Raises ValueError as `chunks_of`."""
    _check(runs, manifest)
    whole, size = manifest.payload_bytes, manifest.chunk_bytes
    return [(first * size, min((first + count) * size, whole) - first * size) for first, count in runs]


def chunk_range(chunk: int, manifest: Manifest) -> tuple[int, int]:
    """(offset, bytes) of one chunk in the shard."""
    begin = chunk * manifest.chunk_bytes
    return begin, min(manifest.chunk_bytes, manifest.payload_bytes - begin)


def in_requests(chunks: Sequence[int]) -> Iterator[list[ChunkRun]]:
    """The runs of these chunks, as many at a time as one request may have."""
    runs = runs_of(chunks)
    for begin in range(0, len(runs), MAX_RUNS):
        yield runs[begin : begin + MAX_RUNS]


def _check(runs: Sequence[ChunkRun], manifest: Manifest) -> None:
    end = 0
    for first, count in runs:
        if first < end or count < 1:
            raise ValueError(f"{count} chunks from {first} on do not follow chunk {end}.")
        end = first + count
    chunks = chunk_count(manifest.payload_bytes, manifest.chunk_bytes)
    if end > chunks:
        raise ValueError(f"Chunk {end - 1} was asked for, and the shard has {chunks}.")
