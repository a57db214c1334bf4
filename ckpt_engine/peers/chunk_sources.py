"""Reads manifest, header and single chunks of a shard from one source: a slot of this host, a disk, a store, or another
engine. Every chunk is verified before it is handed over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetChunks, Reply, ShardVerdict
from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format.chunk_runs import chunk_range, chunks_of, in_requests, runs_of
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import ByteSource, FileSource, read_header
from ckpt_engine.peers.shard_transfer import Take, receive_chunks, receive_manifest
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.rules.fetch_order import FetchStep
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import OpenSegments, SlotTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import StoredBytes
from flyball.contracts.checkpoints import ShardSource, Tier
from flyball.contracts.errors import CorruptShard, RestoreFailed, StaleCommand
from flyball.contracts.recovery import Origin

_IN_MEMORY = (Origin.LOCAL_SLOT, Origin.LOCAL_REPLICA)
_STORED = (Origin.LOCAL_DISK, Origin.PERSISTENT)
_AT_ONCE_BYTES = 8 << 20  # per request to a store, whose latency is that of megabytes


@dataclass(slots=True)
class Delivery:
    """What a source gives: the tier that it is from, and what came through a socket."""

    tier: Tier
    socket_bytes: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard in a source: its manifest, and a private copy of the verified chunks with its header. `path` is a file
    with all of it that this host's trainers can read; '' if there is none."""

    manifest: Manifest
    manifest_bytes: bytes
    header: memoryview
    path: str
    delivery: Delivery


class ChunkSources:
    """Of one step of one generation, on one host. Thread-safe.

    Every method raises CorruptShard, also if a copy is bad, which is then used no more; RestoreFailed if the source
    does not have the shard; StaleCommand if the generation ends; FlyballError; OSError.
    """

    def __init__(
        self,
        generation: HostGeneration,
        step: int,
        *,
        slots: Mapping[Tier, SlotTier],
        disks: Mapping[Tier, ShardStore],
        dial: Dial,
        settings: EngineSettings,
    ) -> None:
        self._generation = generation
        self._step = step
        self._slots = slots
        self._disks = disks
        self._dial = dial
        self._settings = settings

    def in_memory(self, rank: int, written_by: int) -> list[Tier]:
        """The tiers of this host's memory that have the rank's shard."""
        found = []
        for tier, slots in self._slots.items():
            with slots.using(rank) as entry:
                if entry is not None and slots.find(entry, written_by, self._step) is not None:
                    found.append(tier)
        return found

    def open(self, rank: int, step: FetchStep) -> FoundShard:
        """Look for the rank's shard in a source."""
        if step.origin in _IN_MEMORY:
            with self._in_slot(rank, step.source) as (entry, slot, manifest, data, source):
                try:
                    _, header = read_header(source, manifest)
                except CorruptShard:
                    self.distrust(rank, step.source)
                    raise
                return FoundShard(manifest, data, header, entry.segments.path_of(slot), Delivery(step.origin.tier))
        if step.origin in _STORED:
            with self._disk(step.source).reading(step.source.generation, self._step, rank) as (manifest, data, stored):
                try:
                    _, header = read_header(Exactly(stored), manifest)
                except CorruptShard:
                    self.distrust(rank, step.source)
                    raise
                return FoundShard(manifest, data, header, stored.local_path, Delivery(step.origin.tier))
        return self._open_remote(rank, step)

    def read(self, step: FetchStep, manifest: Manifest, chunks: Sequence[int], take: Take, delivery: Delivery) -> None:
        """Read these chunks of the shard, in order. `delivery` is kept up to date, also if this raises."""
        delivery.tier = step.origin.tier
        if step.origin in _IN_MEMORY:
            with self._in_slot(manifest.rank, step.source) as (_, _, _, _, source):
                self._read_pieces(source, manifest, chunks, take)
        elif step.origin in _STORED:
            disk = self._disk(step.source)
            with disk.reading(step.source.generation, self._step, manifest.rank) as (_, _, stored):
                self._read_pieces(Exactly(stored), manifest, chunks, take)
        else:
            with self._dialled(step, delivery) as connection:
                self._ask(connection, manifest, chunks, take, delivery)

    def distrust(self, rank: int, source: ShardSource) -> None:
        """A copy on this host, or in the store, is bad."""
        if source.tier not in self._slots:
            self._disks[source.tier].distrust(source.generation, self._step, rank)
            return
        slots = self._slots[source.tier]
        with slots.using(rank) as entry:
            found = slots.find(entry, source.generation, self._step) if entry is not None else None
            if entry is not None and found is not None:
                entry.segments.discard(found[0])

    @contextmanager
    def _in_slot(
        self, rank: int, source: ShardSource
    ) -> Iterator[tuple[OpenSegments, int, Manifest, bytes, FileSource]]:
        slots = self._slots[source.tier]
        with slots.using(rank) as entry:
            found = slots.find(entry, source.generation, self._step) if entry is not None else None
            if entry is None or found is None:
                raise RestoreFailed("it does not have this step.")
            view, manifest, data = found
            descriptor = entry.segments.open_payload(view.index)
            try:
                yield entry, view.index, manifest, data, FileSource(descriptor)
            finally:
                os.close(descriptor)

    def _disk(self, source: ShardSource) -> ShardStore:
        disk = self._disks.get(source.tier)
        if disk is None:
            raise RestoreFailed("the job has no such tier.")
        return disk

    def _read_pieces(self, source: ByteSource, manifest: Manifest, chunks: Sequence[int], take: Take) -> None:
        for piece in pieces_of(chunks, manifest):
            if self._generation.ended.is_set():
                raise StaleCommand("The restore was given up: a newer generation began.")
            read_piece(source, manifest, piece, take)

    # --- other engines ---

    def _open_remote(self, rank: int, step: FetchStep) -> FoundShard:
        header = bytearray()

        def take(_: int, data: memoryview) -> None:
            header.extend(data)

        wanted = GetChunks(
            self._generation.job, step.source.generation, self._step, rank, runs=((0, 1),), with_manifest=True
        )
        delivery = Delivery(step.origin.tier)
        with self._dialled(step, delivery) as connection:
            reply = self._request(connection, wanted, delivery)
            manifest, data = receive_manifest(
                connection,
                reply.manifest_bytes,
                job=wanted.job,
                run=self._generation.run,
                generation=wanted.generation,
                step=wanted.step,
                rank=rank,
                shard_bytes=reply.shard_bytes,
            )
            receive_chunks(connection, manifest, [0], take, superseded=self._generation.ended.is_set)
            header_bytes = shard_format.header_bytes(memoryview(header), manifest.payload_bytes)
            rest = range(1, -(-header_bytes // manifest.chunk_bytes))
            self._ask(connection, manifest, rest, take, delivery)
        return FoundShard(manifest, data, memoryview(header), "", delivery)

    @contextmanager
    def _dialled(self, step: FetchStep, delivery: Delivery) -> Iterator[Connection]:
        with self._dial(step.source.host_id, step.source.engine_address) as connection:
            delivery.transport = str(connection.transport)
            try:
                yield connection
            finally:
                delivery.socket_bytes += connection.bytes_received

    def _ask(
        self, connection: Connection, manifest: Manifest, chunks: Sequence[int], take: Take, delivery: Delivery
    ) -> None:
        for runs in in_requests(chunks):
            wanted = GetChunks(manifest.job, manifest.generation, manifest.step, manifest.rank, tuple(runs))
            reply = self._request(connection, wanted, delivery)
            if reply.shard_bytes != manifest.payload_bytes:
                raise CorruptShard(f"its shard has {reply.shard_bytes} bytes, and {manifest.payload_bytes} were saved.")
            those = chunks_of(runs, manifest)
            receive_chunks(connection, manifest, those, take, superseded=self._generation.ended.is_set)

    def _request(self, connection: Connection, wanted: GetChunks, delivery: Delivery) -> Reply:
        reply = connection.request(wanted, Reply, timeout_s=self._settings.io_timeout_s)
        if reply.verdict is not ShardVerdict.OK:
            raise RestoreFailed(f"its engine answered {reply.verdict}: {reply.message}")
        if reply.tier is Tier.DISK:
            delivery.tier = Tier.DISK
        return reply


def pieces_of(chunks: Sequence[int], manifest: Manifest) -> Iterator[range]:
    """These chunks, in order, in runs of as much as is read at once."""
    at_once = max(1, _AT_ONCE_BYTES // manifest.chunk_bytes)
    for first, count in runs_of(chunks):
        for begin in range(first, first + count, at_once):
            yield range(begin, min(begin + at_once, first + count))


def read_piece(source: ByteSource, manifest: Manifest, chunks: range, take: Take) -> None:
    """Read neighbouring chunks at once, and hand over each that matches the manifest. Raises CorruptShard, OSError."""
    offset = chunk_range(chunks[0], manifest)[0]
    piece = memoryview(bytearray(sum(chunk_range(chunks[-1], manifest)) - offset))
    source.read_into(piece, offset)
    for chunk in chunks:
        start, size_bytes = chunk_range(chunk, manifest)
        data = piece[start - offset : start - offset + size_bytes]
        integrity.check_chunk(data, chunk, manifest.chunk_digests)
        take(chunk, data)


class Exactly:
    """Reads a stored shard without anything beside what is asked for."""

    def __init__(self, stored: StoredBytes) -> None:
        self.read_into = stored.read_exactly
