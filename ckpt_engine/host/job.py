"""One job on this host: its slots, and the generation that runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.notices import Notice
from ckpt_engine.counters import Counters
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.durable_tiers import REPORTED_STEPS
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.pipeline import RankPipeline
from ckpt_engine.host.running_generation import RunningGeneration
from ckpt_engine.host.save_reports import DifferingLog, LateSaveLog, ReplayLog, SaveFailures
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import JobSlots
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.world.coordination import Coordination
from flyball.contracts.checkpoints import Lineage, RestoreReport, ShardCopy, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import Conflict, StaleCommand
from flyball.contracts.on_host.engine_wire import Configure

log = structlog.get_logger()


class EngineJob:
    """Thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        host: EngineHost,
        peers: PeerAccess,
        contact: DaemonContact,
        clock: Clock,
        counters: Counters,
        on_restored: Callable[[RestoreReport], None],
    ) -> None:
        self.name = name
        self.slots = JobSlots(
            host.shm_prefix,
            name,
            host.host_id,
            SegmentOptions.of(host.settings, give_memory_back=host.give_memory_back),
        )
        self.late_saves = LateSaveLog(name)
        self.replays = ReplayLog()
        self.save_failures = SaveFailures(name)
        self.differing = DifferingLog(name)  # ranks of this host
        self.differing_across = DifferingLog(name)  # of several: what these hold alike may be another matter
        self.running: RunningGeneration | None = None  # it stays when it has ended, until the next one begins
        self._host = host
        self._peers = peers
        self._contact = contact
        self._clock = clock
        self._counters = counters
        self._on_restored = on_restored
        self._swept: HostGeneration | None = None
        self._lock = threading.Lock()  # held while generations change

    @property
    def generation(self) -> HostGeneration | None:
        return self.running.generation if self.running is not None else None

    @property
    def coordination(self) -> Coordination | None:
        return self.running.coordination if self.running is not None else None

    @property
    def disks(self) -> dict[Tier, ShardStore]:
        """The disk tiers of the running generation."""
        return self.running.durable.disks if self.running is not None else {}

    # --- generations ---

    def check(self, configure: Configure) -> bool:
        """Whether this generation has begun already. Raises StaleCommand for an older one, Conflict for the running one
        with another placement."""
        running, requested = self.generation, configure.placement
        if running is not None and requested.generation < running.number:
            raise StaleCommand(f"Generation {running.number} of {self.name} runs, {requested.generation} is over.")
        if running is not None and requested.generation == running.number and requested != running.placement:
            raise Conflict(
                f"Generation {running.number} of {self.name} runs with another placement.",
                hint="a placement never changes within a generation; grant a new one",
            )
        return running is not None and requested.generation == running.number

    def begin(self, configure: Configure, *, resumed: bool = False) -> None:
        """Begin a generation or, `resumed`, take it up again after an engine restart. Idempotent. Shards are fetched in
        the background."""
        with self._lock:
            if self.check(configure):
                return
            self._end_running()
            generation = HostGeneration(configure, self._host.host_id)
            self.slots.use_run(generation.run)
            self.save_failures.begin(generation.number)
            running = RunningGeneration(
                generation,
                slots=self.slots,
                host=self._host,
                peers=self._peers,
                contact=self._contact,
                clock=self._clock,
                counters=self._counters,
                late_saves=self.late_saves,
                save_failures=self.save_failures,
                differing=self.differing,
                differing_across=self.differing_across,
                replays=self.replays,
                on_restored=self._on_restored,
                on_advance=lambda: self._world_advanced(generation),
                resumed=resumed,
            )
            self.running = running
            running.start()

    def end(self, *, join_timeout_s: float) -> None:
        """Stop all work on the job. Segments and files stay."""
        with self._lock:
            pipelines = self._end_running()
        for pipeline in pipelines:
            pipeline.join(join_timeout_s)

    def release(self) -> None:
        """The job ended: free its segments on this host. Its copies on disk stay."""
        self.end(join_timeout_s=0.0)  # a transfer in progress keeps its memory until it ends
        self.slots.release()
        self._host.give_memory_back()

    def _end_running(self) -> list[RankPipeline]:
        pipelines = self.running.end() if self.running is not None else []
        self.late_saves.report_rest(self._clock.wall_s())
        return pipelines

    def _world_advanced(self, generation: HostGeneration) -> None:
        """All ranks have a step of this generation: free what older placements left here."""
        with self._lock:  # held to the end: a generation that begins meanwhile may need what this one does not
            if self._swept is generation or self.generation is not generation:
                return
            self._swept = generation
            memory, replicas = self.slots.memory, self.slots.replicas
            for tier, kept in ((memory, generation.local_ranks), (replicas, generation.replicated_ranks)):
                for rank in tier.ranks():
                    if rank not in kept and tier.remove(rank):
                        log.info("segments_freed", job=self.name, rank=rank, tier=str(tier.tier))

    # --- asked by the daemon ---

    def flush(self, timeout_s: float) -> None:
        """Commit captured slots and scan the disks again, both as far as the time allows."""
        deadline_s = time.monotonic() + timeout_s
        running = self._commit_captured(deadline_s)
        if running is not None:
            running.durable.scan(deadline_s)

    def flush_durably(self, timeout_s: float) -> dict[str, int]:
        """Commit captured slots, and write the newest recovery point to the disk tiers out of schedule. Returns by tier
        the newest step that the local ranks have there."""
        deadline_s = time.monotonic() + timeout_s
        running = self._commit_captured(deadline_s)
        return running.flush_durably(deadline_s) if running is not None else {}

    def drain(self, timeout_s: float) -> None:
        """Finish commits and disk writes in progress, before the engine ends."""
        deadline_s = time.monotonic() + timeout_s
        running = self._commit_captured(deadline_s)
        if running is not None and not running.durable.drain(deadline_s):
            log.warning("disk_write_cut_short", job=self.name)

    def _commit_captured(self, deadline_s: float) -> RunningGeneration | None:
        """Commit captured slots. Returns the generation that runs afterwards: another may have begun meanwhile."""
        if (running := self._begun()) is not None:
            running.commit_captured(deadline_s)
        return self._begun()

    def _begun(self) -> RunningGeneration | None:
        """The running generation. Waits for a `begin` in progress, which may be replacing it."""
        with self._lock:
            return self.running

    def arm(self, step: int) -> tuple[bool, dict[str, int]]:
        """See `RunningGeneration.arm`."""
        if self.running is None:
            raise StaleCommand(f"No generation of {self.name} runs here.", hint="start the job on this host first")
        return self.running.arm(step)

    def disarm(self, generation_number: int) -> None:
        """See `RunningGeneration.disarm`."""
        self._require(generation_number).disarm()

    def await_saved(self, generation_number: int, step: int, timeout_s: float) -> list[int]:
        """See `RunningGeneration.await_saved`. Raises StaleCommand if another generation runs, also afterwards."""
        missing = self._require(generation_number).await_saved(step, timeout_s)
        self._require(generation_number)
        return missing

    def _require(self, generation_number: int) -> RunningGeneration:
        running = self.running
        if running is None or running.generation.number != generation_number:
            number = running.generation.number if running is not None else "none"
            raise StaleCommand(
                f"Asked about generation {generation_number} of {self.name}; the one that runs here is {number}.",
                hint="configure that generation on this host first, or ask about the one that runs",
            )
        return running

    def copies(self, lineage: Lineage | None = None) -> list[ShardCopy]:
        """The verified copies here and in the store that a restore may want. Of a disk tier only the newest steps, and
        the newest that is not suspect. `lineage`: of the job, if it may be a later one than that of the generation
        here."""
        found = self.slots.copies()
        if self.running is not None:
            lineage = self.running.generation.lineage if lineage is None else lineage
            clean_step = self._contact.clean_step(self.name)
            for disk in self.disks.values():
                found += disk.newest_copies(lineage, REPORTED_STEPS, clean_step=clean_step)
        return found

    def report_copies(self) -> list[ShardCopy]:
        """`copies`, for the supervisor. Those in a shared store then stay even if it falls silent."""
        running, copies = self.running, self.copies()
        if running is not None:
            running.durable.note_reported(copies)
        return copies

    # --- reported by trainers and peers ---

    def receive_notice(self, notice: Notice) -> None:
        if self.running is not None:
            self.running.receive_notice(notice)

    def peer_is_up(self, host_id: str) -> None:
        if self.running is not None:
            self.running.peer_is_up(host_id)
