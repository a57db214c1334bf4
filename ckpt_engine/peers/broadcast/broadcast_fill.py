"""Fills the slot of one rank in a broadcast load: its own part from the store, the rest from the hosts and ranks that
read it, all at the same time. What they do not have in time, or pass on damaged, is read from the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.chunk_runs import chunk_range
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.peers.broadcast.bandwidths import Way
from ckpt_engine.peers.broadcast.broadcast_load import BroadcastLoad, Filling
from ckpt_engine.peers.broadcast.passed_on import PassedOn
from ckpt_engine.peers.chunk_sources import Exactly, pieces_of, read_piece
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.broadcast import ChunkPlace, Pairs
from ckpt_engine.rules.peer_patience import PeerPatience
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.slot_bytes import SlotBytes
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.shard_listing import side_by_side
from ckpt_engine.tiers.storage import StoredBytes
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed, StaleCommand, Unreachable

log = structlog.get_logger()

_STORE_READERS = 3  # a request to an object store waits as long as megabytes take
_AT_A_TIME = 8  # threads: those, one for what other ranks here have, and the other hosts
_LOOK_AGAIN_S = 0.05


@dataclass(slots=True)
class ReceivedParts:
    """What came from where."""

    store_bytes: int = 0
    host_bytes: int = 0
    here_bytes: int = 0
    socket_bytes: int = 0
    transport: str = ""


class BroadcastFill:
    """For one slot; call `run` once."""

    def __init__(
        self,
        load: BroadcastLoad,
        generation: HostGeneration,
        rank: int,
        *,
        stored: StoredBytes,
        target: SlotBytes,
        memory: MemoryTier,
        dial: Dial,
        settings: EngineSettings,
        counters: Counters,
    ) -> None:
        """`stored` is the rank's shard in the store, `target` the slot."""
        self._load = load
        self._generation = generation
        self._rank = rank
        self._manifest = load.manifest(rank)
        self._stored = Exactly(stored)
        self._target = target
        self._memory = memory
        self._dial = dial
        self._bandwidths = load.bandwidths
        self._settings = settings
        self._counters = counters
        self._addresses = {host.host_id: host.engine_address for host in generation.placement.hosts}
        self._patience = PeerPatience(settings.io_timeout_s)
        self._passed_on = PassedOn(
            generation,
            manifest=load.manifest,
            patience=self._patience,
            bandwidths=load.bandwidths,
            settings=settings,
            check=self._check,
        )
        self._received = ReceivedParts()
        self._over = threading.Event()  # one of the threads failed
        self._lock = threading.Lock()

    def run(self, slot: int) -> ReceivedParts:
        """Returns when all chunks are in the slot, verified. Raises CorruptShard if the store has bad ones,
        StaleCommand, FlyballError or OSError."""
        reads = self._load.reads(self._rank)
        with self._load.filling(self._rank, slot) as filling:
            for chunk, data in self._load.take_probed(self._rank).items():
                self._take_stored(filling, chunk, data)
            own = [chunk for chunk in reads.own if chunk not in filling.there]
            pieces = iter(list(pieces_of(own, self._manifest)))
            tasks: list[Callable[[], None]] = [partial(self._read_own, filling, pieces)] * _STORE_READERS
            tasks.append(partial(self._copy_here, filling, reads.here))
            tasks += [partial(self._take_from, filling, host, pairs) for host, pairs in self._in_turn(reads.of_hosts)]
            side_by_side(self._unless_over, [lambda: None, *tasks], threads=_AT_A_TIME)
            lacking = integrity.chunk_count(self._manifest.payload_bytes, self._manifest.chunk_bytes) - len(
                filling.there
            )
            if lacking:
                raise RestoreFailed(f"{lacking} chunks of rank {self._rank} came from nowhere.")
        self._counters.add("broadcast_bytes_received", self._received.host_bytes)
        return self._received

    def _in_turn(self, of_hosts: Mapping[str, Pairs]) -> list[tuple[str, Pairs]]:
        """Each host begins with the one after it, so that not all ask the same one first."""
        ordered = sorted(of_hosts.items())
        after = [item for item in ordered if item[0] > self._generation.host_id]
        return after + ordered[: len(ordered) - len(after)]

    def _unless_over(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException:
            self._over.set()
            raise

    def _check(self) -> None:
        if self._generation.ended.is_set():
            raise StaleCommand("The restore was given up: a newer generation began.")
        if self._over.is_set():
            raise RestoreFailed("Another part of the shard could not be read.")

    def _put(self, filling: Filling, chunk: int, data: memoryview) -> None:
        """These bytes, which match the chunk's checksum, are the chunk's."""
        self._target.write(data, chunk_range(chunk, self._manifest)[0])
        self._load.note(filling, chunk)

    # --- the store ---

    def _read_own(self, filling: Filling, pieces: Iterator[range]) -> None:
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            self._read(filling, piece)

    def _read(self, filling: Filling, piece: range) -> None:
        self._check()
        with self._bandwidths.measuring(Way.STORE) as count:

            def take(chunk: int, data: memoryview) -> None:
                count(len(data))
                self._take_stored(filling, chunk, data)

            read_piece(self._stored, self._manifest, piece, take)

    def _take_stored(self, filling: Filling, chunk: int, data: memoryview) -> None:
        self._put(filling, chunk, data)
        self._counters.add("store_bytes_read", len(data))
        with self._lock:
            self._received.store_bytes += len(data)

    def _read_instead(self, filling: Filling, pairs: Pairs, where: str, error: FlyballError | OSError) -> None:
        """Read from the store what is lacking of these chunks."""
        self._check()
        lacking = [chunk for chunk, _ in pairs if chunk not in filling.there]
        self._counters.add("corrupt_copies" if isinstance(error, CorruptShard) else "broadcast_sources_skipped")
        log.warning(
            "broadcast_source_skipped",
            job=self._generation.job,
            rank=self._rank,
            source=where,
            chunks=len(lacking),
            reason=error.message if isinstance(error, FlyballError) else str(error),
        )
        for piece in pieces_of(lacking, self._manifest):
            self._read(filling, piece)

    # --- other hosts ---

    def _take_from(self, filling: Filling, host: str, pairs: Pairs) -> None:
        try:
            with self._dial(host, self._addresses[host]) as connection:
                try:
                    self._passed_on.take(connection, pairs, partial(self._take_passed, filling))
                finally:
                    with self._lock:
                        self._received.socket_bytes += connection.bytes_received
                        self._received.transport = str(connection.transport)
        except StaleCommand:
            raise
        except (FlyballError, OSError) as error:
            self._read_instead(filling, pairs, host, error)

    def _take_passed(self, filling: Filling, chunk: int, data: memoryview) -> None:
        self._put(filling, chunk, data)
        with self._lock:
            self._received.host_bytes += len(data)

    # --- other ranks of this host, and other places in the same shard ---

    def _copy_here(self, filling: Filling, pairs: Pairs) -> None:
        for rank, some in groupby(sorted(pairs, key=lambda pair: pair[1]), key=lambda pair: pair[1].rank):
            mine = tuple(some)
            try:
                with self._memory.using(rank) as entry:
                    if entry is None:
                        raise RestoreFailed("it has no slots.")
                    whole: int | None = None  # its slot with all chunks
                    for chunk, place in mine:
                        slot = whole if whole is not None else self._load.await_chunks(rank, (place.chunk,), 0.0)
                        if slot is None:
                            slot, whole = self._await_chunk(entry, place)
                        self._copy_chunk(filling, entry, slot, chunk, place)
            except StaleCommand:
                raise
            except (FlyballError, OSError) as error:
                self._read_instead(filling, mine, f"rank {rank}", error)

    def _await_chunk(self, entry: OpenSegments, place: ChunkPlace) -> tuple[int, int | None]:
        """The slot of a rank here with the chunk, as soon as it is there; and again if it has all chunks, wherever they
        are from. Raises NotFound; Unreachable if the rank makes no progress."""
        deadline_s, progress = time.monotonic() + self._patience.left_s, 0
        manifest = self._load.manifest(place.rank)
        while True:
            self._check()
            found = self._memory.find(entry, manifest.generation, manifest.step)
            if found is not None:
                return found[0].index, found[0].index
            slot = self._load.await_chunks(place.rank, (place.chunk,), _LOOK_AGAIN_S)
            if slot is not None:
                return slot, None
            if (now := self._load.progress(place.rank)) > progress:
                deadline_s, progress = time.monotonic() + self._patience.left_s, now
            elif time.monotonic() >= deadline_s:
                self._patience.in_vain()
                raise Unreachable(f"Rank {place.rank} did not have the chunk in time.")

    def _copy_chunk(self, filling: Filling, entry: OpenSegments, slot: int, chunk: int, place: ChunkPlace) -> None:
        begin, size_bytes = chunk_range(place.chunk, self._load.manifest(place.rank))
        data = memoryview(bytearray(size_bytes))
        descriptor = entry.segments.open_filled(slot)
        try:
            FileSource(descriptor).read_into(data, begin)
        finally:
            os.close(descriptor)
        integrity.check_chunk(data, chunk, self._manifest.chunk_digests)
        self._put(filling, chunk, data)
        with self._lock:
            self._received.here_bytes += size_bytes
