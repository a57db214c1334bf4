"""Asks the engines of other hosts what their ranks' shards of a step are like, to plan how they are stored together."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import xxhash

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.format.chunk_runs import chunk_range
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.chunk_sources import ChunkSources, FoundShard
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.broadcast import cohort
from ckpt_engine.rules.fetch_order import FetchStep
from ckpt_engine.rules.storage_plan import HeldShard
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.shard_listing import side_by_side
from flyball.contracts.checkpoints import ShardSource, Tier
from flyball.contracts.errors import Unreachable
from flyball.contracts.recovery import Origin

_ASKED_AT_A_TIME = 8
_KEPT_BYTES = 256 << 20  # of fetched chunks: two of each shard, as tensors that are neighbours share them


class CohortShards:
    """The hosts that store a step together with this one: the same that share a restore. Thread-safe."""

    def __init__(self, generation: HostGeneration, *, dial: Dial, settings: EngineSettings) -> None:
        self._generation = generation
        self._dial = dial
        self._settings = settings
        hosts = generation.placement.hosts
        self._members = cohort({host.host_id: host.ranks for host in hosts}, generation.host_id)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of all of these hosts, this one included."""
        return tuple(sorted(rank for ranks in self._members.values() for rank in ranks))

    def ask(self, step: int, deadline_s: float) -> RemoteShards:
        """The other hosts' shards of a step that all ranks have in memory. Raises OSError or FlyballError if one does
        not answer by then (monotonic), or does not have it."""
        generation = self._generation
        written_by = generation.generation_of(step)
        steps = {
            rank: FetchStep(Origin.REMOTE_MEMORY, ShardSource(rank, written_by, Tier.MEMORY, host_id, ""))
            for host_id, ranks in self._members.items()
            if host_id != generation.host_id
            for rank in ranks
        }
        sources = ChunkSources(generation, step, slots={}, disks={}, dial=self._dial, settings=self._settings)
        return RemoteShards(sources, steps, deadline_s)


class RemoteShards:
    """For one thread."""

    def __init__(self, sources: ChunkSources, steps: Mapping[int, FetchStep], deadline_s: float) -> None:
        """`steps`: by rank, where its shard is."""
        self._sources = sources
        self._steps = steps
        self._deadline_s = deadline_s
        ranks = sorted(steps)
        found = side_by_side(self._open, ranks, threads=_ASKED_AT_A_TIME)
        self._found: dict[int, FoundShard] = dict(zip(ranks, found, strict=True))
        self._chunks: dict[tuple[int, int], bytes] = {}  # by rank and number; those used last are at the end
        self._kept_bytes = 0

    @property
    def held(self) -> dict[int, HeldShard]:
        return {rank: _held(found) for rank, found in self._found.items()}

    def hash_range(self, rank: int, begin: int, end: int) -> bytes:
        """The digest of these bytes of a shard, of which the chunks are fetched and verified."""
        manifest = self._found[rank].manifest
        chunk_bytes = manifest.chunk_bytes
        chunks = range(begin // chunk_bytes, -(-end // chunk_bytes))
        self._fetch(rank, manifest, [chunk for chunk in chunks if (rank, chunk) not in self._chunks])
        for chunk in chunks:
            self._chunks[rank, chunk] = self._chunks.pop((rank, chunk))
        data = b"".join(self._chunks[rank, chunk] for chunk in chunks)
        self._forget_oldest()
        start = chunk_range(chunks[0], manifest)[0] if chunks else begin
        return xxhash.xxh3_128_digest(memoryview(data)[begin - start : end - start])

    def _fetch(self, rank: int, manifest: Manifest, chunks: Collection[int]) -> None:
        if chunks:
            self._check_deadline()
            delivery = self._found[rank].delivery

            def take(chunk: int, data: memoryview) -> None:
                self._chunks[rank, chunk] = bytes(data)
                self._kept_bytes += len(data)

            self._sources.read(self._steps[rank], manifest, sorted(chunks), take, delivery)

    def _forget_oldest(self) -> None:
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._chunks.pop(next(iter(self._chunks))))

    def _open(self, rank: int) -> FoundShard:
        self._check_deadline()
        return self._sources.open(rank, self._steps[rank])

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline_s:
            raise Unreachable("Other hosts took too long to describe their shards.", hint="nothing to do")


def _held(found: FoundShard) -> HeldShard:
    header = shard_format.read_header(found.header, found.manifest.payload_bytes)
    return HeldShard(header, found.manifest, manifests.digest(found.manifest_bytes))
