"""The broadcast load of a step that only the store has: the hosts of a cohort read each of the bytes once between them,
and pass them on. Chosen and split by `ckpt_engine.rules.broadcast`, the same on every host, without a coordinator.

A chunk is passed on from the slot that it was read into, as soon as it is there. Nobody waits for long: what another
host or rank does not have in time is read from the store. The receiver verifies every chunk by its own manifest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetChunks
from ckpt_engine.format.chunk_runs import chunks_of
from ckpt_engine.format.integrity import chunk_count
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths, Way, probe_network
from ckpt_engine.peers.chunk_sources import Exactly, pieces_of, read_piece
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.broadcast import Bandwidth, Choice, RankReads, choose, cohort, split
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.shard_listing import side_by_side
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import StoredBytes
from flyball.contracts.checkpoints import RestorePlan
from flyball.contracts.errors import CorruptShard, NotFound

log = structlog.get_logger()

_MANIFESTS_AT_A_TIME = 8
_LONGEST_ANSWER_S = 1.0  # that a peer waits for chunks which this host is about to have


@dataclass(slots=True)
class Filling:
    """A slot of a local rank that is being filled."""

    slot: int
    there: set[int] = field(default_factory=set)  # verified chunks
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Split:
    choice: Choice
    manifests: dict[int, Manifest] = field(default_factory=dict)
    reads: Mapping[int, RankReads] = field(default_factory=dict)  # by local rank


class BroadcastLoad:
    """One generation's restore step on one host. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        store: ShardStore,
        dial: Dial,
        bandwidths: MeasuredBandwidths,
        settings: EngineSettings,
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._store = store
        self._dial = dial
        self.bandwidths = bandwidths
        self._settings = settings
        placement = generation.placement
        self._addresses = {host.host_id: host.engine_address for host in placement.hosts}
        self._cohort = cohort({host.host_id: host.ranks for host in placement.hosts}, generation.host_id)
        self._decided: _Split | None = None
        self._deciding = threading.Lock()
        self._probed: dict[int, memoryview] = {}  # by chunk of the shard of `_probed_rank`
        self._probed_rank = -1
        self._fillings: dict[int, Filling] = {}  # by local rank
        self._changed = threading.Condition()

    # --- the choice ---

    def choice(self, rank: int, stored: StoredBytes) -> Choice:
        """Whether the step is shared. The first call decides; `rank` is a local one, and `stored` its open shard.
        Raises OSError or FlyballError if the store does not answer."""
        with self._deciding:
            if self._decided is None:
                self._decided = self._decide(rank, stored)
                log.info(
                    "broadcast_load" if self._decided.choice.shares else "broadcast_load_not_used",
                    job=self._generation.job,
                    step=self._plan.step,
                    hosts=len(self._cohort),
                    reason=self._decided.choice.reason,
                )
        with self._changed:
            self._changed.notify_all()  # peers may be waiting for the choice
        return self._decided.choice

    def _decide(self, rank: int, stored: StoredBytes) -> _Split:
        setting, host_id = self._settings.broadcast, self._generation.host_id
        ranks = [member for ranks in self._cohort.values() for member in ranks]
        if setting == "off" or len(ranks) < 2 or rank not in ranks:
            return _Split(Choice(False, "broadcast = off" if setting == "off" else "no other rank restores"))
        if len(self._cohort) == 1 and setting == "auto" and stored.shard_path:
            return _Split(Choice(False, "the ranks of one host read the same file"))
        try:
            read = side_by_side(self._manifest, ranks, threads=_MANIFESTS_AT_A_TIME)
        except (CorruptShard, FileNotFoundError) as error:
            return _Split(Choice(False, f"not all manifests can be read: {error}"))
        manifests = dict(zip(ranks, read, strict=True))
        host_of = {member: host for host, members in self._cohort.items() for member in members}
        found = split(manifests, host_of, host_id)
        if not found.shares:
            return _Split(Choice(False, "other ranks need few of the same bytes, or none"))
        if setting == "auto" and not found.hosts:
            return _Split(Choice(True, "ranks of this host need the same bytes"), manifests, found.reads)
        store = network = None
        if setting == "auto":
            store = self.bandwidths.known(Way.STORE) or self._probe_store(
                rank, manifests[rank], found.reads[rank], stored
            )
            network = self.bandwidths.known(Way.NETWORK) or probe_network(
                self._dial,
                {host: self._addresses[host] for host in found.hosts},
                host_id,
                timeout_s=self._settings.io_timeout_s,
            )
        choice = choose(setting, hosts=len(found.hosts) + 1, store=store, network=network)
        if not choice.shares:
            self._probed.clear()
        return _Split(choice, manifests, found.reads) if choice.shares else _Split(choice)

    def _manifest(self, rank: int) -> Manifest:
        return self._store.manifest(self._plan.source_generation, self._plan.step, rank)

    def _probe_store(self, rank: int, manifest: Manifest, reads: RankReads, stored: StoredBytes) -> Bandwidth | None:
        """Read the beginning of what the rank would read if the step is shared: other bytes than other ranks do. They
        are kept for it."""
        count = chunk_count(manifest.payload_bytes, manifest.chunk_bytes)
        piece = next(pieces_of(reads.own or range(count), manifest))
        began_s = time.monotonic()
        read_piece(Exactly(stored), manifest, piece, lambda chunk, data: self._probed.update({chunk: data}))
        size_bytes = sum(map(len, self._probed.values()))
        self._probed_rank = rank
        return Bandwidth(size_bytes / max(time.monotonic() - began_s, 1e-6), "a probe of its shard")

    def take_probed(self, rank: int) -> dict[int, memoryview]:
        """The verified chunks of a local rank's shard that were read to measure the store."""
        with self._deciding:
            if rank != self._probed_rank:
                return {}
            found, self._probed = self._probed, {}
            return found

    def reads(self, rank: int) -> RankReads:
        """What a local rank reads from where, once it was chosen to share."""
        assert self._decided is not None
        return self._decided.reads[rank]

    def manifest(self, rank: int) -> Manifest:
        """Of any rank of the cohort, likewise."""
        assert self._decided is not None
        return self._decided.manifests[rank]

    # --- slots that are being filled ---

    @contextmanager
    def filling(self, rank: int, slot: int) -> Iterator[Filling]:
        """A local rank's slot is filled in the body of the with statement. Others take chunks from it then, and
        afterwards."""
        filling = Filling(slot)
        with self._changed:
            self._fillings[rank] = filling
        try:
            yield filling
        except BaseException:
            filling.failed = True
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def note(self, filling: Filling, chunk: int) -> None:
        """This verified chunk is in the slot."""
        with self._changed:
            filling.there.add(chunk)
            self._changed.notify_all()

    def progress(self, rank: int) -> int:
        """How many chunks a local rank's slot has; 0 if it is not being filled."""
        with self._changed:
            filling = self._fillings.get(rank)
            return len(filling.there) if filling is not None else 0

    def await_chunks(self, rank: int, chunks: Collection[int], timeout_s: float) -> int | None:
        """The slot of a local rank with these chunks, which may be overwritten at any time; None if they are not there
        in time. Raises NotFound if they will not be."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                decided, filling = self._decided, self._fillings.get(rank)
                if self._generation.ended.is_set() or (decided is not None and rank not in decided.reads):
                    raise NotFound("This host does not share what it restores.")
                if filling is not None and filling.failed:
                    raise NotFound("This host could not restore the shard itself.")
                if filling is not None and filling.there.issuperset(chunks):
                    return filling.slot
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    # --- asked by peers ---

    def find(self, wanted: GetChunks) -> tuple[int, Manifest] | None:
        """The slot with what a peer asks for, and the manifest of its shard; None if it is not there yet. Waits for a
        moment. Raises NotFound if this host will not have it, or has not to read it for others."""
        if (wanted.generation, wanted.step) != (self._plan.source_generation, self._plan.step):
            raise NotFound("Another step is being restored.")
        timeout_s = min(_LONGEST_ANSWER_S, self._settings.io_timeout_s / 4)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._decided is not None, timeout_s)
            decided = self._decided
        if decided is None:
            return None
        reads, manifest = decided.reads.get(wanted.rank), decided.manifests.get(wanted.rank)
        if reads is None or manifest is None:
            raise NotFound("This host does not share what it restores.")
        try:
            chunks = chunks_of(wanted.runs, manifest)
        except ValueError as error:
            raise NotFound(str(error)) from error
        # It waits for what this host gets from the store, and for nothing else: so hosts never wait in a circle.
        is_own = set(reads.own).issuperset(chunks)
        slot = self.await_chunks(wanted.rank, chunks, max(deadline_s - time.monotonic(), 0.0) if is_own else 0.0)
        if slot is None and not is_own:
            raise NotFound("Another host reads these chunks.")
        return (slot, manifest) if slot is not None else None
