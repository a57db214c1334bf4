"""Brings a step that was saved in another layout within reach of this host's trainers: a folder in shared memory with
all shards' manifests and headers, and of their other chunks those that the trainers ask for.

A whole copy on this host is only referred to. Everything else is brought once per host, however many ranks want it, and
verified, from the nearest source; if that fails, from the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetChunks
from ckpt_engine.counters import Counters
from ckpt_engine.format.chunk_runs import chunk_range
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths
from ckpt_engine.peers.broadcast.shared_parts import SharedParts, WantedPart
from ckpt_engine.peers.chunk_sources import ChunkSources, Delivery
from ckpt_engine.peers.gathered_shard import GatheredShard
from ckpt_engine.peers.source_trials import SourceTrials
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.fetch_order import FetchStep, gather_order
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots import restore_folders, segment_owner
from ckpt_engine.tiers.memory import JobSlots
from ckpt_engine.tiers.shard_listing import side_by_side
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import restores_another_world
from flyball.contracts.errors import CorruptShard, FlyballError, NotFound, RestoreFailed
from flyball.contracts.recovery import Origin

log = structlog.get_logger()

_AT_A_TIME = 8  # shards: each waits for another host, or the store, most of the time


@dataclass
class Brought:
    """How a rank's chunks came here: `tier_bytes` and `hosts` of all that it wants, `delivery` of what was not here
    before."""

    tier_bytes: dict[Tier, int] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    delivery: Delivery = field(default_factory=lambda: Delivery(Tier.MEMORY))

    @property
    def size_bytes(self) -> int:
        return sum(self.tier_bytes.values())

    @property
    def main_tier(self) -> Tier:
        """The tier that most came from."""
        return max(self.tier_bytes, key=lambda tier: self.tier_bytes[tier], default=Tier.MEMORY)

    def count(self, tier: Tier, host_id: str, size_bytes: int) -> None:
        self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + size_bytes
        self.hosts.add(host_id)

    def add(self, other: Brought) -> None:
        for tier, size_bytes in other.tier_bytes.items():
            self.count(tier, "", size_bytes)
        self.hosts = (self.hosts | other.hosts) - {""}
        self.delivery.socket_bytes += other.delivery.socket_bytes
        self.delivery.transport = self.delivery.transport or other.delivery.transport


class StepGathering:
    """One generation's restore step on one host. Thread-safe.

    All methods raise StaleCommand once the generation has ended; RestoreFailed if no source has something;
    MemoryTooSmall; OSError.
    """

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        prefix: str,
        slots: JobSlots,
        disks: Mapping[Tier, ShardStore],
        dial: Dial,
        settings: EngineSettings,
        counters: Counters,
        bandwidths: MeasuredBandwidths,
    ) -> None:
        """`prefix`: of this host's segments."""
        self._generation = generation
        self._plan = plan
        self._prefix = prefix
        self._settings = settings
        self._counters = counters
        self._sources = ChunkSources(
            generation,
            plan.step,
            slots={Tier.MEMORY: slots.memory, Tier.PEER: slots.replicas},
            disks=disks,
            dial=dial,
            settings=settings,
        )
        self._trials = SourceTrials(generation, plan, disks=disks, counters=counters)
        # Ranks that restore what they saved themselves share in another way, and only some of them may ask here.
        is_shared = (
            settings.broadcast != "off" and Tier.PERSISTENT in disks and restores_another_world(generation.placement)
        )
        self.shared = (
            SharedParts(
                generation,
                plan,
                sources=self._sources,
                dial=dial,
                bandwidths=bandwidths,
                settings=settings,
                counters=counters,
            )
            if is_shared
            else None
        )
        self._lingers_until_s: float | None = None  # the folder stays for other hosts
        self._folder: Path | None = None
        self._failed: FlyballError | OSError | None = None
        self._shards: dict[int, GatheredShard] = {}
        self._filling = [threading.Lock() for _ in range(generation.restored_world_size)]  # by rank that saved
        self._bad: dict[int, set[ShardSource]] = {}  # by the same: whole copies here that turned out bad
        self._headers = Brought()  # what the headers took, until a rank's report has it
        self._opening = threading.Lock()
        self._users: set[int] = set()  # ranks that need the folder
        self._busy = 0  # threads that work in it
        self._lock = threading.Lock()

    @property
    def world_size(self) -> int:
        """How many ranks saved the step."""
        return len(self._filling)

    # --- the folder's life ---

    def open(self, rank: int) -> Path:
        """The folder, with manifests and headers. It stays until `leave(rank)`. If it cannot be made, this fails in the
        same way for every rank."""
        with self._opening, self._working(rank):
            if self._failed is not None:
                raise self._failed
            if self._folder is None:
                try:
                    self._gather()
                except (FlyballError, OSError) as error:
                    self._trials.check_wanted()
                    self._failed = error
                    raise
            assert self._folder is not None
            return self._folder

    def leave(self, rank: int) -> None:
        """The rank has restored, or will not. After the last one the memory is given back."""
        with self._lock:
            self._users.discard(rank)
        self._remove_if_unused()

    def close(self) -> None:
        """The generation has ended. Does not wait for threads that still work in the folder."""
        with self._lock:
            self._users.clear()
        self._remove_if_unused()

    @contextmanager
    def _working(self, rank: int) -> Iterator[None]:
        with self._lock:
            self._trials.check_wanted()
            self._users.add(rank)
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if self._generation.ended.is_set():
                    self._users.clear()
            self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        is_awaited = self.shared is not None and not self._generation.ended.is_set() and self.shared.is_awaited()
        with self._lock:
            if self._users or self._busy:
                return
            if is_awaited and self._folder is not None and self._lingers_until_s is None:
                self._lingers_until_s = time.monotonic() + self._settings.io_timeout_s
                WorkerThread("restore-folder", self._linger).start()
            if is_awaited and self._lingers_until_s is not None and time.monotonic() < self._lingers_until_s:
                return
            folder, self._folder = self._folder, None
            self._shards.clear()
        if folder is not None:
            restore_folders.remove(folder)

    def _linger(self) -> None:
        assert self._lingers_until_s is not None
        self._generation.ended.wait(max(0.0, self._lingers_until_s - time.monotonic()))
        self._remove_if_unused()

    @contextmanager
    def passing_on(self, wanted: GetChunks, host_id: str) -> Iterator[tuple[int, Manifest] | None]:
        """The open file with the chunks that another host asks for, and their shard's manifest, for the body of the
        with statement; None if they are not here yet. Raises NotFound if this host will not have them."""
        if self.shared is None:
            raise NotFound("This host reads nothing from a store for others.")
        shard = self.shared.find(wanted)
        if shard is None:
            yield None
            return
        with self._lock:
            if self._folder is None:
                raise NotFound("This host has restored already.")
            self._busy += 1
        try:
            with shard.opened() as descriptor:
                yield descriptor, shard.manifest
            self.shared.note_passed_on(host_id, sum(count for _, count in wanted.runs))
        finally:
            with self._lock:
                self._busy -= 1
            self._remove_if_unused()

    # --- manifests and headers ---

    def _gather(self) -> None:
        missing = [rank for rank in range(self.world_size) if not self._order(rank)]
        if missing:
            ranks = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            raise RestoreFailed(
                f"No source within reach has the shards of rank {ranks} of step {self._plan.step}, which "
                f"{self.world_size} ranks saved.",
                hint="nothing to do: the controller chooses an older recovery point",
            )
        self._folder = restore_folders.make(self._prefix, self._generation.job, self._generation.number)
        side_by_side(self._open_shard, range(self.world_size), threads=_AT_A_TIME)
        log.info(
            "step_gathered",
            job=self._generation.job,
            step=self._plan.step,
            shards=self.world_size,
            whole_here=sum(shard.linked is not None for shard in self._shards.values()),
            folder=self._folder.name,
        )

    def _order(self, rank: int) -> tuple[FetchStep, ...]:
        in_memory = self._sources.in_memory(rank, self._plan.source_generation)
        order = gather_order(
            self._plan,
            rank,
            placement=self._generation.placement,
            host_id=self._generation.host_id,
            in_memory=in_memory,
        )
        return tuple(step for step in order if step.source not in self._bad.get(rank, ()))

    def _open_shard(self, rank: int) -> None:
        """Bring the manifest and the header, and refer to a whole copy if there is one here."""
        self._shards[rank] = self._trials.first(
            rank, partial(self._order, rank), partial(self._open_from, rank), reasons=[]
        )

    def _open_from(self, rank: int, step: FetchStep) -> GatheredShard:
        self._trials.check_wanted()
        found = self._sources.open(rank, step)
        if found.manifest.world_size != self.world_size:
            raise CorruptShard(
                f"{found.manifest.world_size} ranks saved it, and {self.world_size} are the step's.",
                hint="nothing to do: another copy is tried",
            )
        assert self._folder is not None
        shard = GatheredShard(self._folder, found.manifest, found.manifest_bytes, len(found.header))
        if found.path and segment_owner.can_read(found.path):
            shard.link(found.path, step.source)
        else:
            shard.begin(found.header, step.source, found.delivery.tier)
            with self._lock:
                self._headers.add(Brought(delivery=found.delivery))
        return shard

    # --- chunks ---

    def manifests(self, rank: int) -> dict[int, Manifest]:
        """Of all shards, while `rank` has not left."""
        with self._working(rank):
            return {number: shard.manifest for number, shard in self._shards.items()}

    def bring(self, rank: int, wanted: Mapping[int, Sequence[int]]) -> Brought:
        """Bring what is lacking of the chunks that `rank` wants, by the rank that saved them."""
        with self._working(rank):
            needed_bytes = sum(
                chunk_range(chunk, self._shards[saved].manifest)[1]
                for saved, chunks in wanted.items()
                for chunk in self._shards[saved].lacking(chunks)
            )
            if needed_bytes:
                limit_bytes = self._settings.memory_limit_bytes
                restore_folders.check_room(self._prefix, self._generation.job, needed_bytes, limit_bytes)
            if self.shared is not None:
                delivery = self.shared.bring(rank, self._from_store(wanted), self._shards)
                with self._lock:
                    self._headers.add(Brought(delivery=delivery))
            with self._lock:
                brought, self._headers = self._headers, Brought()
            found = side_by_side(
                lambda item: self._bring_chunks(*item), [item for item in wanted.items() if item[1]], threads=_AT_A_TIME
            )
            for one in found:
                brought.add(one)
            return brought

    def _from_store(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, WantedPart]:
        """What is lacking of these chunks, and has to come from the store."""
        found = {}
        for saved, chunks in wanted.items():
            shard, order = self._shards[saved], self._order(saved)
            lacking = shard.lacking(chunks)
            if lacking and order and order[0].origin is Origin.PERSISTENT:
                found[saved] = WantedPart(shard, order[0], lacking)
        return found

    def recheck(self, rank: int, wanted: Mapping[int, Sequence[int]]) -> None:
        """A trainer read something bad. Verify what it wants, and all headers. A whole copy here that is bad is used no
        more; of others the bad chunks have to be brought again."""
        with self._working(rank):
            for saved in range(self.world_size):
                with self._filling[saved]:
                    shard = self._shards[saved]
                    bad = shard.bad(wanted.get(saved, ()))
                    if not bad:
                        continue
                    self._counters.add("corrupt_copies")
                    log.warning("restore_chunks_bad", step=self._plan.step, rank=saved, chunks=bad[:8], count=len(bad))
                    if shard.linked is None:
                        shard.forget(bad)
                    else:
                        self._bad.setdefault(saved, set()).add(shard.linked)
                        self._sources.distrust(saved, shard.linked)
                        self._open_shard(saved)

    def _bring_chunks(self, rank: int, chunks: Sequence[int]) -> Brought:
        """`rank` saved them."""
        brought = Brought()
        with self._filling[rank]:  # so that whoever else wants them finds them here
            shard = self._shards[rank]
            if shard.lacking(chunks):

                def attempt(step: FetchStep) -> None:
                    self._read(shard, chunks, step, brought.delivery)

                self._trials.first(rank, partial(self._order, rank), attempt, reasons=[])
            for tier, host_id, size_bytes in shard.origins(chunks):
                brought.count(tier, host_id, size_bytes)
        return brought

    def _read(self, shard: GatheredShard, chunks: Sequence[int], step: FetchStep, delivery: Delivery) -> None:
        """Bring what is still lacking. What arrived before an error stays."""
        self._trials.check_wanted()
        with shard.opened() as descriptor:

            def take(chunk: int, data: memoryview) -> None:
                shard.write(descriptor, chunk, data, step.source.host_id, delivery.tier)

            self._sources.read(step, shard.manifest, shard.lacking(chunks), take, delivery)
