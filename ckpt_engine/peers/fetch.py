"""Brings a rank's restore step into a local slot. Sources are tried in turn, and every copy is verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetShard, Reply, ShardVerdict
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import ByteSource, MemorySink, MemorySource, read_verified
from ckpt_engine.peers.shard_transfer import receive_manifest, receive_payload
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.fetch_order import FetchStep, fetch_order, source_generation
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotView, choose_slot
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments, PeerTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import RestorePlan, Tier
from flyball.contracts.errors import (
    CorruptShard,
    FlyballError,
    RestoreFailed,
    StaleCommand,
    StorageFull,
    Unreachable,
)
from flyball.contracts.recovery import Origin

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where the bytes are now, and where they came from. Either verified in a slot, or (slot -1) unverified in the
    file `path`."""

    slot: int
    size_bytes: int
    tier: Tier
    host_id: str
    socket_bytes: int
    path: str = ""

    @property
    def in_slot(self) -> bool:
        return self.slot >= 0


_STORE_AWAY_S = 60.0  # how long an unreachable store is tried again
_LOOK_AGAIN_S = 1.0


class Fetcher:
    """Fetches the shards of one generation's restore step for the ranks of this host."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        memory: MemoryTier,
        replicas: PeerTier,
        disks: Mapping[Tier, ShardStore],
        dial: Dial,
        settings: EngineSettings,
        counters: Counters,
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._memory = memory
        self._replicas = replicas
        self._disks = disks
        self._dial = dial
        self._settings = settings
        self._counters = counters

    def local_slot(self, entry: OpenSegments, reasons: list[str]) -> Fetched | None:
        """The rank's own slot, if it holds the step and every chunk is good. A bad slot is dropped, with the reason in
        `reasons`."""
        written_by = source_generation(self._plan, entry.rank)
        found = None if written_by is None else self._memory.find(entry, written_by, self._plan.step)
        if found is None:
            return None
        view, manifest, _ = found
        try:
            integrity.verify(entry.segments.payload(view.index), manifest.chunk_digests, manifest.chunk_bytes)
        except CorruptShard as error:
            if entry.segments.unchanged(view):
                self._demote(entry.rank, "local slot", error, reasons)
                entry.segments.discard(view)
                return None
            # Overwritten meanwhile: the trainer restored from it, and is two saves further already.
        return Fetched(view.index, view.payload_bytes, Tier.MEMORY, self._generation.host_id, 0)

    def local_file(self, rank: int) -> Fetched | None:
        """The first source, if it is a file that processes of this host can read. Its bytes are not verified."""
        step = next(iter(fetch_order(self._plan, rank, host_id=self._generation.host_id)), None)
        tier = self._disks.get(step.source.tier) if step else None
        if step is None or tier is None or step.origin not in (Origin.LOCAL_DISK, Origin.PERSISTENT):
            return None
        try:
            with tier.reading(step.source.generation, self._plan.step, rank) as (manifest, _, stored):
                size_bytes, path = manifest.payload_bytes, stored.local_path
                return Fetched(-1, size_bytes, step.origin.tier, step.source.host_id, 0, path) if path else None
        except (FlyballError, OSError):
            return None  # `fetch` tries it again, and reports why

    def fetch(self, entry: OpenSegments, reasons: list[str]) -> Fetched:
        """Fetch the rank's shard into a local slot, verified and committed. An unreachable store is tried again for a
        while. Raises RestoreFailed with the reasons of all sources, after those in `reasons`; StaleCommand if the
        generation ends."""
        patience_s = min(_STORE_AWAY_S, self._generation.configure.spec.restore_timeout_s / 2)
        deadline_s = time.monotonic() + patience_s
        earlier = len(reasons)
        is_away = True
        while is_away:
            del reasons[earlier:]
            is_away = False
            for step in fetch_order(self._plan, entry.rank, host_id=self._generation.host_id):
                try:
                    return self._try(entry, step)
                except StaleCommand:
                    raise
                except (FlyballError, OSError) as error:
                    where = f"{step.source.tier} of {step.source.host_id or 'the store'}"
                    self._demote(entry.rank, where, error, reasons)
                    is_away = is_away or (step.origin is Origin.PERSISTENT and self._is_away(error))
            is_away = is_away and time.monotonic() < deadline_s
            if is_away and self._generation.ended.wait(_LOOK_AGAIN_S):
                raise StaleCommand("The restore was given up: a newer generation began.")
        raise RestoreFailed(
            f"No source has step {self._plan.step} of rank {entry.rank}. "
            + (" ".join(reasons) or "The restore plan names none."),
            hint="nothing to do: the controller chooses an older recovery point",
        )

    def _is_away(self, error: FlyballError | OSError) -> bool:
        """Whether the store is merely unreachable, and may have the step. A share that is not mounted looks like an
        empty folder."""
        if not isinstance(error, FileNotFoundError):
            return isinstance(error, OSError | Unreachable)
        try:
            return self._disks[Tier.PERSISTENT].is_empty()
        except (FlyballError, OSError):
            return True

    def _demote(self, rank: int, where: str, error: FlyballError | OSError, reasons: list[str]) -> None:
        reasons.append(f"{where}: {error.message if isinstance(error, FlyballError) else error}")
        self._counters.add("corrupt_copies" if isinstance(error, CorruptShard) else "restore_sources_skipped")
        log.warning("restore_source_skipped", rank=rank, step=self._plan.step, reason=reasons[-1])

    def _try(self, entry: OpenSegments, step: FetchStep) -> Fetched:
        if step.origin is Origin.LOCAL_REPLICA:
            return self._from_replica(entry, step)
        if step.origin in (Origin.LOCAL_DISK, Origin.PERSISTENT):
            return self._from_disk(entry, step)
        return self._from_engine(entry, step)

    def _from_replica(self, entry: OpenSegments, step: FetchStep) -> Fetched:
        with self._replicas.using(entry.rank) as replica:
            found = self._replicas.find(replica, step.source.generation, self._plan.step) if replica else None
            if replica is None or found is None:
                raise RestoreFailed("it does not have this step.")
            view, manifest, manifest_bytes = found
            source = MemorySource(replica.segments.payload(view.index))

            def copy(target: memoryview) -> None:
                try:
                    self._copy(source, manifest, target)
                except CorruptShard:
                    replica.segments.discard(view)  # unless it holds something newer by now
                    raise

            return self._commit(entry, step, manifest, manifest_bytes, copy)

    def _from_disk(self, entry: OpenSegments, step: FetchStep) -> Fetched:
        tier = self._disks.get(step.source.tier)
        if tier is None:
            raise RestoreFailed("the job has no such tier.")
        with tier.reading(step.source.generation, self._plan.step, entry.rank) as (manifest, manifest_bytes, stored):

            def copy(target: memoryview) -> None:
                try:
                    self._copy(stored, manifest, target)
                except CorruptShard:
                    tier.distrust(step.source.generation, self._plan.step, entry.rank)
                    raise

            return self._commit(entry, step, manifest, manifest_bytes, copy)

    def _from_engine(self, entry: OpenSegments, step: FetchStep) -> Fetched:
        wanted = GetShard(self._generation.job, step.source.generation, self._plan.step, entry.rank)
        with self._dial(step.source.host_id, step.source.engine_address) as connection:
            reply = connection.request(wanted, Reply, timeout_s=self._settings.io_timeout_s)
            if reply.verdict is not ShardVerdict.OK:
                raise RestoreFailed(f"its engine answered {reply.verdict}: {reply.message}")
            manifest, manifest_bytes = receive_manifest(
                connection,
                reply.manifest_bytes,
                job=wanted.job,
                run=self._generation.run,
                generation=wanted.generation,
                step=wanted.step,
                rank=wanted.rank,
                shard_bytes=reply.shard_bytes,
            )

            def copy(target: memoryview) -> None:
                receive_payload(connection, manifest, target, superseded=self._generation.ended.is_set)

            fetched = self._commit(entry, step, manifest, manifest_bytes, copy)
            tier = Tier.DISK if reply.tier is Tier.DISK else fetched.tier
            return Fetched(fetched.slot, fetched.size_bytes, tier, fetched.host_id, connection.bytes_received)

    def _copy(self, source: ByteSource, manifest: Manifest, target: memoryview) -> None:
        """Fill `target` with verified bytes. Raises CorruptShard, OSError, StaleCommand."""
        read_verified(source, manifest, MemorySink(target, before=self._check_wanted))

    def _check_wanted(self) -> None:
        if self._generation.ended.is_set():
            raise StaleCommand("The restore was given up: a newer generation began.")

    def _commit(
        self,
        entry: OpenSegments,
        step: FetchStep,
        manifest: Manifest,
        manifest_bytes: bytes,
        copy: Callable[[memoryview], None],
    ) -> Fetched:
        """Commit a free slot that `copy` has filled with verified bytes."""
        self._check_wanted()
        segments = entry.segments
        with entry.writing:
            slot = self._free_slot(segments.slots())
            plan = MemoryPlan(
                manifest.payload_bytes,
                local_ranks=len(self._generation.local_ranks),
                replicas=len(self._generation.replica_hosts),
            )
            target = segments.begin_write(slot.index, manifest.generation, manifest.step, manifest.payload_bytes, plan)
            began = segments.control.slot(slot.index)
            try:
                copy(target)
                if not segments.unchanged(began):
                    raise CorruptShard("the slot was overwritten while it was being filled.")
                segments.mark_captured(slot.index)
                if not segments.commit(segments.control.slot(slot.index), manifest_bytes):
                    raise CorruptShard("the slot was overwritten while it was being filled.")
            except BaseException:
                segments.drop(slot.index)
                raise
        return Fetched(slot.index, manifest.payload_bytes, step.origin.tier, step.source.host_id, 0)

    def _free_slot(self, slots: list[SlotView]) -> SlotView:
        slot = choose_slot(slots, self._plan.step, self._generation.lineage, ())
        if slot is None:
            raise StorageFull("both local slots hold newer steps of this generation.")
        return slot
