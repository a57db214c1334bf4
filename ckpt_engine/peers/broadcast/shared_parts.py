"""The load in another layout of a step that only the store has: the hosts that want the same bytes read each of them
once between them, and pass them on. Split by `ckpt_engine.rules.broadcast`, alike on every host, without a coordinator.

When all ranks of this host have asked, the other hosts are asked what theirs want. A host first reads its own part
from the store, then takes the rest from those that read it: so hosts never wait in a circle. Nobody waits for long.
What this does not bring, for whatever reason, is read from the store afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetChunks, ListWanted, ShardVerdict, WantedList
from ckpt_engine.contracts.wanted_chunks import WantedShard
from ckpt_engine.counters import Counters
from ckpt_engine.format import integrity
from ckpt_engine.format.chunk_runs import MAX_RUNS, chunk_range, chunks_of, runs_of
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths, Way, probe_network
from ckpt_engine.peers.broadcast.passed_on import PassedOn
from ckpt_engine.peers.chunk_sources import ChunkSources, Delivery, pieces_of
from ckpt_engine.peers.gathered_shard import GatheredShard
from ckpt_engine.peers.transport.pool import Dial
from ckpt_engine.rules.broadcast import Bandwidth, Choice, ChunkPlace, PartReads, choose, cohort, split_parts
from ckpt_engine.rules.fetch_order import FetchStep
from ckpt_engine.rules.peer_patience import PeerPatience
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.shard_listing import side_by_side
from flyball.contracts.checkpoints import RestorePlan, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, NotFound, StaleCommand

log = structlog.get_logger()

_AT_A_TIME = 8  # threads
_STORE_READERS = 3  # of one shard: a request to an object store waits as long as megabytes take
_LONGEST_ANSWER_S = 1.0  # that a peer waits for what this host is about to have
_LOOK_AGAIN_S = 0.05

Pairs = Sequence[tuple[ChunkPlace, ChunkPlace]]


@dataclass(frozen=True, slots=True)
class WantedPart:
    """What one rank wants of one shard that has to come from the store."""

    shard: GatheredShard
    step: FetchStep  # the store
    chunks: Sequence[int]


class SharedParts:
    """One generation's restore step on one host. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        sources: ChunkSources,
        dial: Dial,
        bandwidths: MeasuredBandwidths,
        settings: EngineSettings,
        counters: Counters,
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._sources = sources
        self._dial = dial
        self._bandwidths = bandwidths
        self._settings = settings
        self._counters = counters
        placement = generation.placement
        shares_with = cohort({host.host_id: host.ranks for host in placement.hosts}, generation.host_id)
        self._addresses = {
            host.host_id: host.engine_address
            for host in placement.hosts
            if host.host_id in shares_with and host.host_id != generation.host_id and host.engine_address
        }
        self._patience = {host_id: PeerPatience(settings.io_timeout_s) for host_id in self._addresses}
        self._once = threading.Lock()  # held by the local rank that brings for all
        self._changed = threading.Condition()
        self._asked: dict[int, list[ChunkPlace]] = {}  # by local rank
        self._shards: Mapping[int, GatheredShard] = {}  # by the rank that saved it
        self._steps: dict[int, FetchStep] = {}  # likewise
        self._mine: list[ChunkPlace] | None = None  # what all local ranks want
        self._reads: PartReads | None = None
        self._is_decided = False
        self._is_over = False
        self._served: Counter[str] = Counter()  # by host: chunks that were passed on
        self._delivery = Delivery(Tier.PEER)

    def bring(self, rank: int, wanted: Mapping[int, WantedPart], shards: Mapping[int, GatheredShard]) -> Delivery:
        """Bring what the local ranks want, as far as that works. The first local rank that asks does it for all; the
        others wait for it. Returns what came through sockets, once. `wanted` by the rank that saved the shards,
        `shards` of all of them. Raises StaleCommand."""
        with self._changed:
            self._shards = shards
            self._steps |= {saved: part.step for saved, part in wanted.items()}
            self._asked[rank] = [ChunkPlace(saved, chunk) for saved, part in wanted.items() for chunk in part.chunks]
            if self._asked.keys() >= set(self._generation.local_ranks):
                self._know_mine()
            self._changed.notify_all()
        if not wanted:
            return Delivery(Tier.PEER)
        with self._once:
            if not self._is_over:
                try:
                    self._bring_all()
                finally:
                    with self._changed:
                        self._is_decided = self._is_over = True
                        self._changed.notify_all()
            delivery, self._delivery = self._delivery, Delivery(Tier.PEER)
            return delivery

    def _bring_all(self) -> None:
        deadline_s = time.monotonic() + self._settings.io_timeout_s
        with self._changed:
            while self._mine is None and (left_s := deadline_s - time.monotonic()) > 0:
                self._check()
                self._changed.wait(min(left_s, _LOOK_AGAIN_S))
            mine = self._know_mine()
        hosts = list(self._addresses)
        found: dict[str, list[ChunkPlace] | None] = {}

        def ask(host_id: str) -> None:
            found[host_id] = self._ask_wanted(host_id, deadline_s)

        self._side_by_side([partial(ask, host_id) for host_id in hosts])
        wanted = {host_id: places for host_id, places in found.items() if places}
        manifests = {saved: shard.manifest for saved, shard in self._shards.items()}
        reads = split_parts({**wanted, self._generation.host_id: mine}, manifests, self._generation.host_id)
        choice = self._choose(reads, mine)
        log.info(
            "broadcast_load" if choice.shares else "broadcast_load_not_used",
            job=self._generation.job,
            step=self._plan.step,
            hosts=len(wanted) + 1,
            reason=choice.reason,
        )
        if not choice.shares:
            return
        with self._changed:
            self._reads, self._is_decided = reads, True
            self._changed.notify_all()
        self._read_own(reads)
        self._side_by_side([partial(self._take_from, host_id, pairs) for host_id, pairs in self._in_turn(reads)])
        self._copy_here(reads)
        self._bandwidths.store()

    def _know_mine(self) -> list[ChunkPlace]:
        """What the local ranks want that have asked by now: of others this learns too late."""
        if self._mine is None:
            self._mine = sorted({place for places in self._asked.values() for place in places})
            self._changed.notify_all()
        return self._mine

    def _side_by_side(self, tasks: Sequence[Callable[[], None]]) -> None:
        side_by_side(lambda task: task(), [lambda: None, *tasks], threads=_AT_A_TIME)

    def _check(self) -> None:
        if self._generation.ended.is_set():
            raise StaleCommand("The restore was given up: a newer generation began.")

    # --- the choice ---

    def _ask_wanted(self, host_id: str, deadline_s: float) -> list[ChunkPlace] | None:
        """What the ranks of another host want; None if it does not say so in time."""
        asked = ListWanted(self._generation.job, self._generation.number, self._plan.step)
        try:
            with self._dial(host_id, self._addresses[host_id]) as connection:
                while True:
                    self._check()
                    reply = connection.request(asked, WantedList, timeout_s=self._settings.io_timeout_s)
                    if reply.verdict is ShardVerdict.OK:
                        return [
                            ChunkPlace(part.rank, chunk)
                            for part in reply.shards
                            for chunk in chunks_of(part.runs, self._shards[part.rank].manifest)
                        ]
                    if reply.verdict is not ShardVerdict.BUSY or time.monotonic() >= deadline_s:
                        self._skipped(host_id, reply.message)
                        return None
                    self._generation.ended.wait(_LOOK_AGAIN_S)
        except StaleCommand:
            raise
        except (FlyballError, OSError, ValueError, KeyError) as error:
            self._skipped(host_id, _reason(error))
            return None

    def _choose(self, reads: PartReads, mine: Sequence[ChunkPlace]) -> Choice:
        setting = self._settings.broadcast
        hosts = sorted({*reads.of_hosts, *reads.given})
        if not reads.shares:
            return Choice(False, "other hosts want few of the same bytes, or none")
        if setting == "auto" and not hosts:
            return Choice(True, "ranks of this host want the same bytes")
        store = network = None
        if setting == "auto":
            store = self._bandwidths.known(Way.STORE) or self._probe_store(reads, mine)
            addresses = {host_id: self._addresses[host_id] for host_id in hosts}
            network = self._bandwidths.known(Way.NETWORK) or probe_network(
                self._dial, addresses, self._generation.host_id, timeout_s=self._settings.io_timeout_s
            )
        return choose(setting, hosts=len(hosts) + 1, store=store, network=network)

    def _probe_store(self, reads: PartReads, mine: Sequence[ChunkPlace]) -> Bandwidth | None:
        """Read the beginning of what this host reads anyway."""
        saved, chunks = next(iter(reads.own.items()), (mine[0].rank, (mine[0].chunk,)))
        manifest = self._shards[saved].manifest
        piece = next(pieces_of(chunks, manifest))
        began_s = time.monotonic()
        try:
            self._read_stored(saved, piece)
        except StaleCommand:
            raise
        except (FlyballError, OSError) as error:
            self._skipped("the store", _reason(error))
            return None
        size_bytes = sum(chunk_range(chunk, manifest)[1] for chunk in piece)
        return Bandwidth(size_bytes / max(time.monotonic() - began_s, 1e-6), "a probe of its part")

    # --- the parts ---

    def _read_own(self, reads: PartReads) -> None:
        tasks = []
        for saved, chunks in reads.own.items():
            lacking = self._shards[saved].lacking(chunks)
            for reader in range(_STORE_READERS):
                some = lacking[reader * len(lacking) // _STORE_READERS : (reader + 1) * len(lacking) // _STORE_READERS]
                if some:
                    tasks.append(partial(self._read_or_skip, saved, some))
        self._side_by_side(tasks)

    def _read_or_skip(self, saved: int, chunks: Sequence[int]) -> None:
        """What this cannot read is tried again later, in other ways too."""
        try:
            self._read_stored(saved, chunks)
        except StaleCommand:
            raise
        except (FlyballError, OSError) as error:
            self._skipped("the store", _reason(error))

    def _read_stored(self, saved: int, chunks: Sequence[int]) -> None:
        shard, step = self._shards[saved], self._steps[saved]
        with shard.opened() as descriptor, self._bandwidths.measuring(Way.STORE) as count:

            def take(chunk: int, data: memoryview) -> None:
                count(len(data))
                self._counters.add("store_bytes_read", len(data))
                shard.write(descriptor, chunk, data, step.source.host_id, step.origin.tier)
                with self._changed:
                    self._changed.notify_all()

            self._sources.read(step, shard.manifest, chunks, take, Delivery(step.origin.tier))

    def _in_turn(self, reads: PartReads) -> Iterator[tuple[str, Pairs]]:
        """Each host begins with the one after it, so that not all ask the same one first."""
        ordered = sorted(reads.of_hosts.items())
        yield from (item for item in ordered if item[0] > self._generation.host_id)
        yield from (item for item in ordered if item[0] < self._generation.host_id)

    def _take_from(self, host_id: str, pairs: Pairs) -> None:
        passed_on = PassedOn(
            self._generation,
            manifest=lambda saved: self._shards[saved].manifest,
            patience=self._patience[host_id],
            bandwidths=self._bandwidths,
            settings=self._settings,
            check=self._check,
        )

        def put(place: ChunkPlace, data: memoryview) -> None:
            self._write(place, data, host_id, Tier.PEER)
            self._counters.add("broadcast_bytes_received", len(data))

        try:
            with self._dial(host_id, self._addresses[host_id]) as connection:
                try:
                    passed_on.take(connection, pairs, put)
                finally:
                    with self._changed:
                        self._delivery.socket_bytes += connection.bytes_received
                        self._delivery.transport = str(connection.transport)
        except StaleCommand:
            raise
        except (FlyballError, OSError) as error:
            self._counters.add("corrupt_copies" if isinstance(error, CorruptShard) else "broadcast_sources_skipped")
            self._skipped(host_id, _reason(error))

    def _copy_here(self, reads: PartReads) -> None:
        for place, other in reads.here:
            shard = self._shards[other.rank]
            if shard.lacking([other.chunk]):
                continue
            try:
                data = shard.read(other.chunk)
                integrity.check_chunk(data, place.chunk, self._shards[place.rank].manifest.chunk_digests)
            except (CorruptShard, OSError) as error:
                self._skipped("this host's memory", _reason(error))
                continue
            self._write(place, data, self._generation.host_id, Tier.MEMORY)

    def _write(self, place: ChunkPlace, data: memoryview, host_id: str, tier: Tier) -> None:
        shard = self._shards[place.rank]
        with shard.opened() as descriptor:
            shard.write(descriptor, place.chunk, data, host_id, tier)

    def _skipped(self, source: str, reason: str) -> None:
        log.warning("broadcast_source_skipped", job=self._generation.job, source=source, reason=reason)

    # --- asked by peers ---

    def list_wanted(self) -> WantedList:
        """What the ranks of this host want. Waits for them, for a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._mine is not None or self._is_over, self._answer_s)
            mine = self._mine
            is_over = self._is_over
        if mine is None:
            verdict = ShardVerdict.MISSING if is_over else ShardVerdict.BUSY
            return WantedList(verdict, "Not all ranks have asked.")
        chunks: dict[int, list[int]] = {}
        for place in mine:
            chunks.setdefault(place.rank, []).append(place.chunk)
        shards = tuple(WantedShard(saved, tuple(runs_of(some))) for saved, some in chunks.items())
        if sum(len(part.runs) for part in shards) > MAX_RUNS:
            return WantedList(ShardVerdict.MISSING, "The ranks want too many small parts.")
        return WantedList(ShardVerdict.OK, shards=shards)

    def find(self, wanted: GetChunks) -> GatheredShard | None:
        """The shard with the chunks that a peer asks for, which are here; None if they are not here yet. Waits for a
        moment. Raises NotFound if this host will not have them, or has not to read them for others."""
        if (wanted.generation, wanted.step) != (self._plan.source_generation, self._plan.step):
            raise NotFound("Another step is being restored.")
        deadline_s = time.monotonic() + self._answer_s
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided, self._answer_s)
            if not self._is_decided:
                return None
            shard = self._shards.get(wanted.rank)
            if shard is None or shard.linked is not None:
                raise NotFound("This host does not share this shard.")
            try:
                chunks = chunks_of(wanted.runs, shard.manifest)
            except ValueError as error:
                raise NotFound(str(error)) from error
            # It waits for what this host gets from the store, and for nothing else: so hosts never wait in a circle.
            is_own = self._reads is not None and set(self._reads.own.get(wanted.rank, ())).issuperset(chunks)
            while shard.lacking(chunks):
                if self._is_over or not is_own or self._generation.ended.is_set():
                    raise NotFound("This host does not read these chunks.")
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left_s)
            return shard

    @property
    def _answer_s(self) -> float:
        return min(_LONGEST_ANSWER_S, self._settings.io_timeout_s / 4)

    def note_passed_on(self, host_id: str, chunks: int) -> None:
        """Another host has got these chunks."""
        with self._changed:
            self._served[host_id] += chunks

    def is_awaited(self) -> bool:
        """Whether other hosts have not got all that they get from this one."""
        with self._changed:
            given = self._reads.given if self._reads is not None else {}
            return any(self._served[host_id] < chunks for host_id, chunks in given.items())


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, FlyballError) else str(error)
