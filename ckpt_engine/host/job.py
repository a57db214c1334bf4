"""One job on this host, as its engine sees it: the generation that runs, its slots, and who works on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.notices import LATE_S, Notice, SaveAborted, SaveWaited
from ckpt_engine.contracts.peer_wire import Reply, TierReport
from ckpt_engine.host import emergency
from ckpt_engine.host.context import Services
from ckpt_engine.host.durable_tiers import DurableTiers
from ckpt_engine.host.late_saves import LateSaveLog
from ckpt_engine.host.pipeline import RankPipeline
from ckpt_engine.host.refill import Refill
from ckpt_engine.host.restoring import Restoring
from ckpt_engine.host.save_failures import SaveFailures
from ckpt_engine.peers.replication import Offer, send_replica
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.peer import PeerTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.world.coordination import Coordination
from ckpt_engine.world.save_clock import SaveClock
from ckpt_engine.world.save_pace import factor_of
from ckpt_engine.world.save_schedule import is_due
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import Conflict, StaleCommand
from flyball.contracts.on_host.engine_wire import Configure, SaveFailure

log = structlog.get_logger()

TOLD_STEPS = 16  # of each slow tier


class EngineJob:
    """All methods may be called from any thread."""

    def __init__(self, name: str, services: Services) -> None:
        self.name = name
        options = SegmentOptions.of(services.settings)
        self.memory = MemoryTier(services.shm_prefix, name, services.host_id, options)
        self.replicas = PeerTier(services.shm_prefix, name, services.host_id, options)
        self.late_saves = LateSaveLog(name)
        self.save_failures = SaveFailures(name)
        self.generation: HostGeneration | None = None
        self.coordination: Coordination | None = None
        self._services = services
        self._pipelines: dict[int, RankPipeline] = {}
        self._durable: DurableTiers | None = None
        self._swept: HostGeneration | None = None
        self._lock = threading.Lock()  # generation changes
        self._progress = threading.Condition()
        self._reporting = threading.Lock()

    # --- generations ---

    def check(self, configure: Configure) -> None:
        """Raise what `begin` would refuse: an older generation, or the running one with another placement."""
        running, asked = self.generation, configure.placement
        if running is not None and asked.generation < running.number:
            raise StaleCommand(f"Generation {running.number} of {self.name} runs, {asked.generation} is over.")
        if running is not None and asked.generation == running.number and asked != running.placement:
            raise Conflict(
                f"Generation {running.number} of {self.name} runs with another placement.",
                hint="a placement never changes within a generation; grant a new one",
            )

    def begin(self, configure: Configure, *, resumed: bool = False) -> None:
        """A generation begins or, `resumed`, is taken up again by a restarted engine. Repeated, it changes nothing.
        What has to be fetched is fetched in the background."""
        with self._lock:
            self.check(configure)
            if self.generation is not None and self.generation.number == configure.placement.generation:
                return
            self._end_running()
            generation = HostGeneration(configure, self._services.host_id)
            self.memory.run = self.replicas.run = generation.run
            self.save_failures.begin(generation.number)
            coordination, durable = self._coordinate(generation)
            self.generation, self.coordination, self._durable = generation, coordination, durable
            self._pipelines = {
                rank: self._make_pipeline(rank, generation, coordination, resumed) for rank in generation.local_ranks
            }
            coordination.repeat()
            for pipeline in self._pipelines.values():
                pipeline.start()
            durable.start()
            SaveClock(
                generation,
                memory=self.memory,
                coordination=coordination,
                counters=self._services.counters,
                on_passed_by=self._passed_by,
            ).start()

    def end(self, *, join_timeout_s: float) -> None:
        """Stop all work on the job; segments and files stay."""
        with self._lock:
            pipelines = list(self._pipelines.values())
            self._end_running()
        for pipeline in pipelines:
            pipeline.join(join_timeout_s)

    def close(self) -> None:
        """Let go of segments that were opened for one answer: as long as they are open they are not reclaimed."""
        self.memory.close()
        self.replicas.close()

    def release(self) -> None:
        """The job ended: free its segments on this host. Its copies on disk stay."""
        self.end(join_timeout_s=0.0)  # a transfer that is going on keeps its memory until it ends
        self.memory.release()
        self.replicas.release()

    @property
    def disks(self) -> dict[Tier, ShardStore]:
        """The disk tiers of the running generation."""
        return self._durable.disks if self._durable is not None else {}

    def _end_running(self) -> None:
        if self.generation is not None:
            self.generation.ended.set()
        for pipeline in self._pipelines.values():
            pipeline.kick()
        if self._durable is not None:
            self._durable.stop()
        self._pipelines = {}
        self.late_saves.tell_rest(self._services.clock.wall_s())

    def _coordinate(self, generation: HostGeneration) -> tuple[Coordination, DurableTiers]:
        """The two know each other: what is written depends on the world, and the world on what was written."""
        coordination: Coordination

        def progressed(rank: int) -> None:
            self._rank_progressed(coordination, rank)

        def sealed(report: TierReport) -> None:
            coordination.hear_seals(report)

        durable = DurableTiers(
            generation,
            self._services,
            memory=self.memory,
            on_failure=partial(self._note_failure, generation, self.save_failures.remember),
            on_progress=progressed,
            on_sealed=sealed,
        )
        coordination = Coordination(
            generation,
            memory=self.memory,
            links=self._services.links,
            counters=self._services.counters,
            clock=self._services.clock,
            on_advance=partial(self._world_advanced, generation),
            on_naming=durable.hear,
            on_written=durable.seal,
            schedules=durable.schedules,
        )
        return coordination, durable

    def _make_pipeline(
        self, rank: int, generation: HostGeneration, coordination: Coordination, resumed: bool
    ) -> RankPipeline:
        services = self._services
        on_failure = partial(self._note_failure, generation, self.save_failures.failed)
        on_progress = partial(self._rank_progressed, coordination)
        first: list[Callable[[OpenSegments], bool]] = []
        if resumed and services.settings.refill and generation.replica_hosts:
            refill = Refill(generation, memory=self.memory, replicas=self.replicas, services=services)
            first.append(refill.run)
        if generation.restore is not None:
            restoring = Restoring(
                generation,
                generation.restore,
                memory=self.memory,
                replicas=self.replicas,
                disks=self.disks,
                services=services,
                on_report=services.restores.add,
            )
            restoring.announce(rank)
            first.append(restoring.run)
        return RankPipeline(
            rank,
            generation,
            memory=self.memory,
            world=coordination.world,
            put_replica=partial(self._put_replica, generation),
            peer_down_s=services.links.down_s,
            first=first,
            on_progress=on_progress,
            on_failure=on_failure,
            counters=services.counters,
            settings=services.settings,
            clock=services.clock,
            code_version=services.code_version,
        )

    # --- what the daemon asks ---

    def flush(self, timeout_s: float) -> None:
        """Commit what was captured, and look at the disks again; both as far as the time allows."""
        deadline_s = time.monotonic() + timeout_s
        self._commit_captured(deadline_s)
        durable = self._durable
        if durable is not None:
            durable.scan(deadline_s)

    def drain(self, timeout_s: float) -> None:
        """Finish commits and disk writes in flight, for an engine that is to end."""
        deadline_s = time.monotonic() + timeout_s
        self._commit_captured(deadline_s)
        durable = self._durable
        if durable is not None and not durable.drain(deadline_s):
            log.warning("disk_write_cut_short", job=self.name)

    def flush_durably(self, timeout_s: float) -> dict[str, int]:
        """Commit what was captured, and have the newest recovery point written to the disk tiers, out of schedule.
        Returns by tier the newest step that the local ranks have there."""
        deadline_s = time.monotonic() + timeout_s
        self._commit_captured(deadline_s)
        with self._lock:
            generation, coordination, durable = self.generation, self.coordination, self._durable
            pipelines = dict(self._pipelines)
        if generation is None or coordination is None or durable is None:
            return {}
        with durable.in_haste():
            reached = emergency.flush(
                generation,
                memory=self.memory,
                coordination=coordination,
                durable=durable,
                pipelines=pipelines,
                wait=self._wait_for_progress,
                deadline_s=deadline_s,
            )
        durable.scan(deadline_s)  # for the inventory: other hosts have written to the store
        return reached

    def _commit_captured(self, deadline_s: float) -> None:
        with self._lock:
            pipelines = list(self._pipelines.values())
        for pipeline in pipelines:
            pipeline.kick()  # they work side by side; the loop below waits for each in turn
        for pipeline in pipelines:
            if (left_s := deadline_s - time.monotonic()) > 0:
                pipeline.commit_captured(left_s)

    def arm(self, step: int) -> tuple[bool, dict[str, int]]:
        """Have the local ranks save and park at `step`. (armed, positions): not armed if some rank has passed it."""
        generation = self._any_generation()
        armed, positions = emergency.arm(generation, self.memory, step)
        if not armed:
            self._give_up_emergency(generation, {int(rank): step for rank in positions if positions[rank] >= step})
        return armed, positions

    def disarm(self, generation_number: int) -> None:
        """Ranks that wait at an emergency step train on; those that have not reached it will not stop there."""
        generation = self._running(generation_number)
        self._give_up_emergency(generation, emergency.disarm(generation, self.memory))

    def _give_up_emergency(self, generation: HostGeneration, steps: Mapping[int, int]) -> None:
        """These ranks will not save these steps: said, so that ranks that have done so get their slots back."""
        for rank, step in steps.items():
            pipeline = self._pipelines.get(rank)
            if pipeline is not None and not is_due(generation.configure.spec, step, factor=self._save_factor):
                pipeline.fail(step, f"The emergency checkpoint at step {step} was given up.")

    @property
    def _save_factor(self) -> int:
        return factor_of(self.coordination.world.present.pace) if self.coordination is not None else 1

    def await_saved(self, generation_number: int, step: int, timeout_s: float) -> list[int]:
        """Wait until every local rank has committed, and replicated, `step`. Returns the ranks that have not."""
        generation = self._running(generation_number)

        def missing() -> list[int]:
            return [
                rank
                for rank, pipeline in self._pipelines.items()
                if step not in pipeline.saved_steps and step > generation.restore_step
            ]

        def settled() -> bool:
            failed = any(step in pipeline.failed_steps for pipeline in self._pipelines.values())
            return not missing() or failed or generation.ended.is_set()

        with self._progress:
            self._progress.wait_for(settled, timeout_s)
        self._running(generation_number)
        return missing()

    def copies(self) -> list[ShardCopy]:
        """The verified copies on this host and in the store that a restore may want: of a slow tier the newest steps.
        It may keep others for ever, every host tells of what all share, and a message has a limit."""
        found = [*self.memory.copies(), *self.replicas.copies()]
        generation, disks = self.generation, self.disks
        if generation is not None:
            for disk in disks.values():
                found += disk.newest_copies(generation.lineage, TOLD_STEPS)
        return found

    def tell_copies(self) -> list[ShardCopy]:
        """`copies`, for the supervisor: those of a shared store stay if it is not heard of any more."""
        durable, copies = self._durable, self.copies()
        if durable is not None:
            durable.told(copies)
        return copies

    # --- what trainers and peers say ---

    def notice(self, notice: Notice) -> None:
        """A local trainer captured a step, or could not."""
        pipeline = self._pipelines.get(notice.rank)
        generation = self.generation
        if pipeline is None or generation is None or notice.generation != generation.number:
            return
        if self.coordination is not None:
            self.coordination.hear_trainer(notice)
        if isinstance(notice, SaveAborted):
            pipeline.fail(notice.step, notice.message)
        elif isinstance(notice, SaveWaited):
            if notice.waited_s >= LATE_S:
                self._services.counters.add("saves_late")
                self.late_saves.note(notice, self._services.clock.wall_s())
        else:
            pipeline.kick()
            if self._durable is not None:
                self._durable.captured(notice.rank, notice.step)

    def peer_is_up(self, host_id: str) -> None:
        """A connection to this host was made, for the first time or again."""
        generation, coordination = self.generation, self.coordination
        if generation is None or coordination is None or host_id not in generation.linked_hosts:
            return
        coordination.peer_is_up(host_id)
        if host_id in generation.replica_hosts:
            for pipeline in list(self._pipelines.values()):
                pipeline.peer_is_back(host_id)

    def _any_generation(self) -> HostGeneration:
        if self.generation is None:
            raise StaleCommand(f"No generation of {self.name} runs here.", hint="the job is to be started first")
        return self.generation

    def _wait_for_progress(self, timeout_s: float) -> None:
        with self._progress:
            self._progress.wait(timeout_s)

    def _running(self, generation_number: int) -> HostGeneration:
        generation = self.generation
        if generation is None or generation.number != generation_number:
            running = generation.number if generation is not None else "none"
            raise StaleCommand(
                f"Asked about generation {generation_number} of {self.name}; the one that runs here is {running}.",
                hint="configure that generation on this host first, or ask about the one that runs",
            )
        return generation

    # --- what happens in the pipelines' threads ---

    def _put_replica(self, generation: HostGeneration, peer: str, offer: Offer) -> Reply:
        def pace(size_bytes: int) -> None:
            self._services.peer_limit.wait(size_bytes, generation.ended.wait)
            if generation.ended.is_set():
                raise StaleCommand("The copy to a peer was given up: a newer generation began.")

        with self._services.pool.connection(peer) as connection:
            return send_replica(connection, offer, settings=self._services.settings, pace=pace)

    def _rank_progressed(self, coordination: Coordination, rank: int) -> None:
        pipeline = self._pipelines.get(rank)
        if pipeline is not None and coordination is self.coordination:
            with self._reporting:  # the newest report takes the place of older ones, so it must be the newest
                reports = self._durable.reports(rank) if self._durable is not None else ()
                saving = pipeline.saving_step  # first: steps that are saved meanwhile are in what is read next
                saved = pipeline.saved_steps
                coordination.report(rank, saved, pipeline.failed_steps, reports, saving)
                self.save_failures.kept(rank, max(saved, default=-1), self._services.clock.wall_s())
        with self._progress:
            self._progress.notify_all()

    def _passed_by(self, rank: int, step: int) -> None:
        pipeline = self._pipelines.get(rank)
        if pipeline is not None and step not in pipeline.saved_steps:
            pipeline.fail(step, f"Rank {rank} was past step {step} when it heard that it was to be saved.")

    def _world_advanced(self, generation: HostGeneration) -> None:
        """All ranks have a step of this generation, so what older placements left here is not needed any more."""
        with self._lock:  # held to the end: a generation that begins meanwhile may need what this one does not
            if self._swept is generation or self.generation is not generation:
                return
            self._swept = generation
            for tier, kept in ((self.memory, generation.local_ranks), (self.replicas, generation.replicated_ranks)):
                for rank in tier.ranks():
                    if rank not in kept and tier.remove(rank):
                        log.info("segments_freed", job=self.name, rank=rank, tier=str(tier.tier))

    def _note_failure(
        self, generation: HostGeneration, note: Callable[[SaveFailure], None], rank: int, step: int, message: str
    ) -> None:
        note(SaveFailure(self.name, generation.number, rank, step, message, at=self._services.clock.wall_s()))
