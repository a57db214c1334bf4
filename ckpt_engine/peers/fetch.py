"""Brings a rank's restore step into a local slot. Sources are tried in turn, and every copy is verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt_engine.contracts.control_views import KeptStep
from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetShard, Reply, ShardVerdict
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.verified_read import ByteSource, TargetSink, read_verified
from ckpt_engine.peers.broadcast.bandwidths import Way
from ckpt_engine.peers.broadcast.broadcast_fill import BroadcastFill, ReceivedParts
from ckpt_engine.peers.broadcast.broadcast_load import BroadcastLoad
from ckpt_engine.peers.shard_transfer import receive_manifest, receive_payload
from ckpt_engine.peers.source_trials import SourceTrials
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.fetch_order import FetchStep, fetch_order, source_generation
from ckpt_engine.rules.memory_plan import MemoryPlan
from ckpt_engine.rules.slot_rules import SlotView, choose_slot, kept_steps
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.slot_bytes import SlotBytes
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments, PeerTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import StoredBytes
from flyball.contracts.checkpoints import RestorePlan, Tier
from flyball.contracts.errors import (
    CorruptShard,
    FlyballError,
    RestoreFailed,
    StorageFull,
)
from flyball.contracts.recovery import Origin


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
    transport: str = ""  # between engines; '' from nearer by
    tier_bytes: Mapping[Tier, int] = field(default_factory=dict)  # of a broadcast load: how much each tier gave

    @property
    def in_slot(self) -> bool:
        return self.slot >= 0


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
        broadcast: BroadcastLoad | None = None,
    ) -> None:
        """`broadcast`: of the same step, if the job has a persistent tier."""
        self._generation = generation
        self._plan = plan
        self._broadcast = broadcast
        self._counters = counters
        self._memory = memory
        self._replicas = replicas
        self._disks = disks
        self._dial = dial
        self._settings = settings
        self._trials = SourceTrials(generation, plan, disks=disks, counters=counters)

    def local_slot(self, entry: OpenSegments, reasons: list[str]) -> Fetched | None:
        """The rank's own slot, if it holds the step and every chunk is good. A bad slot is dropped, with the reason in
        `reasons`."""
        written_by = source_generation(self._plan, entry.rank)
        found = None if written_by is None else self._memory.find(entry, written_by, self._plan.step)
        if found is None:
            return None
        view, manifest, _ = found
        try:
            with entry.segments.bytes_of(view.index) as payload:
                integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
        except (CorruptShard, OSError) as error:
            if entry.segments.unchanged(view):
                self._trials.demote(entry.rank, "local slot", error, reasons)
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
                size_bytes, path = manifest.payload_bytes, stored.shard_path
                if path and self._shares(rank, step, stored):
                    return None
                return Fetched(-1, size_bytes, step.origin.tier, step.source.host_id, 0, path) if path else None
        except (FlyballError, OSError):
            return None  # `fetch` tries it again, and reports why

    def fetch(self, entry: OpenSegments, reasons: list[str]) -> Fetched:
        """Fetch the rank's shard into a local slot, verified and committed. An unreachable store is tried again for a
        while. Raises RestoreFailed with the reasons of all sources, after those in `reasons`; StaleCommand if the
        generation ends."""

        def steps() -> tuple[FetchStep, ...]:
            return fetch_order(self._plan, entry.rank, host_id=self._generation.host_id)

        return self._trials.first(entry.rank, steps, partial(self._try, entry), reasons)

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

            def copy(target: SlotBytes, _slot: int) -> None:
                try:
                    with replica.segments.bytes_of(view.index) as source:
                        self._copy(source, manifest, target)
                except CorruptShard:
                    replica.segments.discard(view)  # unless it holds something newer by now
                    raise

            return self._commit(entry, step, manifest, manifest_bytes, copy)

    def _from_disk(self, entry: OpenSegments, step: FetchStep) -> Fetched:
        tier = self._disks.get(step.source.tier)
        if tier is None:
            raise RestoreFailed("the job has no such tier.")
        rank = entry.rank
        with tier.reading(step.source.generation, self._plan.step, rank) as (manifest, manifest_bytes, stored):
            received: list[ReceivedParts] = []

            def copy(target: SlotBytes, slot: int) -> None:
                try:
                    if self._broadcast is not None and self._shares(rank, step, stored):
                        if self._broadcast.manifest(rank) != manifest:  # the chunks are verified by that one
                            raise RestoreFailed("the stored shard was replaced meanwhile.")
                        received.append(self._fill(self._broadcast, rank, slot, stored, target))
                    elif self._broadcast is not None and step.origin is Origin.PERSISTENT:
                        with self._broadcast.bandwidths.measuring(Way.STORE) as count:
                            self._copy(stored, manifest, target)
                            count(len(target))
                        self._counters.add("store_bytes_read", len(target))
                    else:
                        self._copy(stored, manifest, target)
                except CorruptShard:
                    tier.distrust(step.source.generation, self._plan.step, rank)
                    raise

            fetched = self._commit(entry, step, manifest, manifest_bytes, copy)
            if self._broadcast is not None and step.origin is Origin.PERSISTENT:
                self._broadcast.bandwidths.store()
            return self._with_parts(fetched, received[0]) if received else fetched

    def _shares(self, rank: int, step: FetchStep, stored: StoredBytes) -> bool:
        """Whether the hosts share the reading of the step."""
        if self._broadcast is None or step.origin is not Origin.PERSISTENT:
            return False
        return self._broadcast.choice(rank, stored).shares

    def _fill(
        self, broadcast: BroadcastLoad, rank: int, slot: int, stored: StoredBytes, target: SlotBytes
    ) -> ReceivedParts:
        fill = BroadcastFill(
            broadcast,
            self._generation,
            rank,
            stored=stored,
            target=target,
            memory=self._memory,
            dial=self._dial,
            settings=self._settings,
            counters=self._counters,
        )
        return fill.run(slot)

    def _with_parts(self, fetched: Fetched, received: ReceivedParts) -> Fetched:
        parts = {
            Tier.PERSISTENT: received.store_bytes,
            Tier.PEER: received.host_bytes,
            Tier.MEMORY: received.here_bytes,
        }
        return replace(
            fetched,
            socket_bytes=received.socket_bytes,
            transport=received.transport,
            tier_bytes={tier: size_bytes for tier, size_bytes in parts.items() if size_bytes},
        )

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

            def copy(target: SlotBytes, _slot: int) -> None:
                with connection.land_in(target.descriptor):
                    receive_payload(connection, manifest, target, superseded=self._generation.ended.is_set)

            fetched = self._commit(entry, step, manifest, manifest_bytes, copy)
            tier = Tier.DISK if reply.tier is Tier.DISK else fetched.tier
            return replace(
                fetched, tier=tier, socket_bytes=connection.bytes_received, transport=str(connection.transport)
            )

    def _copy(self, source: ByteSource, manifest: Manifest, target: SlotBytes) -> None:
        """Fill `target` with verified bytes. Raises CorruptShard, OSError, StaleCommand."""
        read_verified(source, manifest, TargetSink(target, before=self._trials.check_wanted))

    def _commit(
        self,
        entry: OpenSegments,
        step: FetchStep,
        manifest: Manifest,
        manifest_bytes: bytes,
        copy: Callable[[SlotBytes, int], None],
    ) -> Fetched:
        """Commit a free slot that `copy(its bytes, its index)` has filled with verified bytes."""
        self._trials.check_wanted()
        segments = entry.segments
        with entry.writing:
            slot = self._free_slot(segments.slots(), segments.read_world().kept)
            plan = MemoryPlan(
                manifest.payload_bytes,
                local_ranks=len(self._generation.local_ranks),
                replicas=len(self._generation.replica_hosts),
            )
            target = segments.begin_fill(slot.index, manifest.generation, manifest.step, manifest.payload_bytes, plan)
            began = segments.control.slot(slot.index)
            try:
                with target:
                    copy(target, slot.index)
                if not segments.unchanged(began):
                    raise CorruptShard("the slot was overwritten while it was being filled.")
                segments.mark_captured(slot.index)
                if not segments.commit(segments.control.slot(slot.index), manifest_bytes):
                    raise CorruptShard("the slot was overwritten while it was being filled.")
            except BaseException:
                segments.drop(slot.index)
                raise
        return Fetched(slot.index, manifest.payload_bytes, step.origin.tier, step.source.host_id, 0)

    def _free_slot(self, slots: list[SlotView], kept: KeptStep) -> SlotView:
        slot = choose_slot(slots, self._plan.step, self._generation.lineage, (), kept_steps(slots, kept))
        slot = slot or choose_slot(slots, self._plan.step, self._generation.lineage, ())
        if slot is None:
            raise StorageFull("both local slots hold newer steps of this generation.")
        return slot
