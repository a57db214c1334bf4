"""One generation of a job on this host: its coordination, its disk tiers, and a pipeline per local rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.notices import (
    LATE_S,
    Notice,
    ReplayDiffered,
    ReplayEqual,
    RestoreMoved,
    SaveAborted,
    SaveWaited,
)
from ckpt_engine.contracts.peer_wire import TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.host import emergency
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.durable_tiers import DurableTiers
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.pipeline import Fill, RankPipeline
from ckpt_engine.host.refill import Refill
from ckpt_engine.host.resharding import Resharding
from ckpt_engine.host.restoring import Restoring
from ckpt_engine.host.save_reports import DifferingLog, LateSaveLog, ReplayLog, SaveFailures
from ckpt_engine.peers.broadcast.broadcast_load import BroadcastLoad
from ckpt_engine.peers.cohort_shards import CohortShards
from ckpt_engine.peers.fetch import Fetcher
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.peers.step_gathering import StepGathering
from ckpt_engine.rules.save_pace import factor_of
from ckpt_engine.rules.save_schedule import is_due
from ckpt_engine.rules.storage_plan import StoragePlan
from ckpt_engine.rules.tier_schedule import StepMarks
from ckpt_engine.slots import restore_folders
from ckpt_engine.tiers.memory import JobSlots
from ckpt_engine.world.coordination import Coordination
from ckpt_engine.world.save_clock import SaveClock
from flyball.contracts.checkpoints import RestorePlan, RestoreReport, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.on_host.engine_wire import SaveFailure
from flyball.contracts.reports.training_health import ReplayDiffers

log = structlog.get_logger()


class RunningGeneration:
    """Thread-safe. After `end` it only answers questions."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        slots: JobSlots,
        host: EngineHost,
        peers: PeerAccess,
        contact: DaemonContact,
        clock: Clock,
        counters: Counters,
        late_saves: LateSaveLog,
        save_failures: SaveFailures,
        differing: DifferingLog,
        differing_across: DifferingLog,
        replays: ReplayLog,
        on_restored: Callable[[RestoreReport], None],
        on_advance: Callable[[], None],
        resumed: bool,
    ) -> None:
        """`on_advance` is called after the world step moved. `resumed`: a killed engine had begun this generation."""
        self.generation = generation
        self._slots = slots
        self._host = host
        self._peers, self._dial = peers, peers.dials_for(generation.job)
        self._clock = clock
        self._counters = counters
        self._late_saves = late_saves
        self._save_failures = save_failures
        self._replays = replays
        self._on_restored = on_restored
        self._progress = threading.Condition()
        self._reporting = threading.Lock()
        self.durable = DurableTiers(
            generation,
            host,
            memory=slots.memory,
            contact=contact,
            clock=clock,
            counters=counters,
            on_failure=partial(self._note_failure, save_failures.remember),
            on_compared=partial(self._note_compared, differing),
            on_compared_across=partial(self._note_compared, differing_across),
            marks=StepMarks(
                clean_step=lambda: differing_across.clean_step(
                    generation.number, differing.clean_step(generation.number, contact.clean_step(generation.job))
                ),
                proven_step=lambda: replays.proven_step(generation.number),
                is_known=lambda: not resumed or contact.knows_clean_steps,  # a killed engine may have known of a harm
            ),
            on_progress=self._report_rank,
            on_sealed=self._receive_seals,
            # At their newest addresses: engines may have restarted since the placement was made.
            cohort=CohortShards(generation, dial=peers.dials_for(generation.job), settings=host.settings),
            coordinator_down_s=lambda: peers.links.down_s(generation.coordinator_host),
        )
        self.coordination = Coordination(
            generation,
            memory=slots.memory,
            links=peers.links,
            counters=counters,
            clock=clock,
            on_advance=on_advance,
            on_naming=self.durable.receive,
            on_written=self.durable.seal,
            schedules=self.durable.schedules,
        )
        self.broadcast = self._make_broadcast()
        self.gathering: StepGathering | None = None
        self._resharding: Resharding | None = None
        if generation.restore is not None:
            self.gathering = self._make_gathering(generation.restore)
            self._resharding = Resharding(
                generation,
                generation.restore.step,
                self.gathering,
                clock=clock,
                counters=counters,
                on_report=on_restored,
            )
        self.pipelines = {rank: self._make_pipeline(rank, resumed) for rank in generation.local_ranks}
        self._save_clock = SaveClock(
            generation,
            memory=slots.memory,
            coordination=self.coordination,
            counters=counters,
            on_passed_by=self._passed_by,
        )

    def start(self) -> None:
        self.coordination.repeat()
        for pipeline in self.pipelines.values():
            pipeline.start()
        self.durable.start()
        self._save_clock.start()

    def end(self) -> list[RankPipeline]:
        """Stop all work without waiting for it; returns the pipelines, to wait for."""
        self.generation.ended.set()
        if self.gathering is not None:
            self.gathering.close()
        pipelines, self.pipelines = list(self.pipelines.values()), {}
        for pipeline in pipelines:
            pipeline.kick()
        self.durable.stop()
        with self._progress:
            self._progress.notify_all()  # nobody need wait any more
        return pipelines

    def _make_pipeline(self, rank: int, resumed: bool) -> RankPipeline:
        return RankPipeline(
            rank,
            self.generation,
            memory=self._slots.memory,
            world=self.coordination.world,
            put_replica=partial(self._peers.put_replica, self.generation),
            peer_down_s=self._peers.links.down_s,
            first=self._fills(rank, resumed),
            on_progress=self._report_rank,
            on_failure=partial(self._note_failure, self._save_failures.failed),
            counters=self._counters,
            settings=self._host.settings,
            clock=self._clock,
        )

    def _fills(self, rank: int, resumed: bool) -> list[Fill]:
        """The copies to bring into the rank's slots before its pipeline saves anything."""
        fills: list[Fill] = []
        generation, plan = self.generation, self.generation.restore
        make_fetcher = partial(
            Fetcher,
            generation,
            memory=self._slots.memory,
            replicas=self._slots.replicas,
            settings=self._host.settings,
            counters=self._counters,
        )
        if resumed and self._host.settings.refill and generation.replica_hosts:
            refill = Refill(
                generation,
                # Not at the placement's address: a restarted peer has called from a newer one.
                make_fetcher=partial(make_fetcher, disks={}, dial=lambda host, _: self._dial(host, "")),
                dial=lambda host: self._peers.dial(host, "", generation.job),
                settings=self._host.settings,
                clock=self._clock,
                counters=self._counters,
            )
            fills.append(refill.run)
        if plan is not None and self._resharding is not None:
            restoring = Restoring(
                generation,
                plan,
                memory=self._slots.memory,
                fetcher=make_fetcher(plan, disks=self.durable.disks, dial=self._dial, broadcast=self.broadcast),
                clock=self._clock,
                counters=self._counters,
                on_report=self._on_restored,
                reshard=self._resharding.run,
            )
            restoring.announce(rank)
            fills.append(restoring.run)
        return fills

    def _make_broadcast(self) -> BroadcastLoad | None:
        generation, store = self.generation, self.durable.disks.get(Tier.PERSISTENT)
        if generation.restore is None or store is None:
            return None
        return BroadcastLoad(
            generation,
            generation.restore,
            store=store,
            dial=self._dial,
            bandwidths=self._host.bandwidths,
            settings=self._host.settings,
        )

    def _make_gathering(self, plan: RestorePlan) -> StepGathering:
        generation = self.generation
        for folder in restore_folders.remove_of_job(self._host.shm_prefix, generation.job):  # of a killed engine
            log.info("restore_folder_removed", job=generation.job, folder=folder.name)
        return StepGathering(
            generation,
            plan,
            prefix=self._host.shm_prefix,
            slots=self._slots,
            disks=self.durable.disks,
            dial=self._dial,
            settings=self._host.settings,
            counters=self._counters,
            bandwidths=self._host.bandwidths,
        )

    # --- asked by the daemon ---

    def commit_captured(self, deadline_s: float) -> None:
        """Commit captured slots, until the deadline at most (monotonic)."""
        pipelines = list(self.pipelines.values())
        for pipeline in pipelines:
            pipeline.kick()  # they work in parallel; the loop below waits for each in turn
        for pipeline in pipelines:
            if (left_s := deadline_s - time.monotonic()) > 0:
                pipeline.commit_captured(left_s)

    def flush_durably(self, deadline_s: float) -> dict[str, int]:
        """Have the newest recovery point written to the disk tiers out of schedule. Returns by tier the newest step
        that the local ranks have there."""
        with self.durable.in_haste():
            reached = emergency.flush(
                self.generation,
                memory=self._slots.memory,
                coordination=self.coordination,
                durable=self.durable,
                pipelines=self.pipelines.copy(),
                wait=self._wait_for_progress,
                deadline_s=deadline_s,
            )
        self.durable.scan(deadline_s)  # for the inventory: other hosts have written to the store
        return reached

    def arm(self, step: int) -> tuple[bool, dict[str, int]]:
        """Have the local ranks save and park at `step`. Returns (armed, positions by rank). If some rank has passed the
        step, none is armed."""
        armed, positions = emergency.arm(self.generation, self._slots.memory, step)
        if not armed:
            self._give_up_emergency({int(rank): step for rank in positions if positions[rank] >= step})
        return armed, positions

    def disarm(self) -> None:
        """Let parked ranks train on. Ranks that have not reached the step will not stop at it."""
        self._give_up_emergency(emergency.disarm(self.generation, self._slots.memory))

    def await_saved(self, step: int, timeout_s: float) -> list[int]:
        """Wait until every local rank has committed and replicated `step`. Returns the ranks that have not. If the
        generation ends meanwhile, the answer is as of then."""
        pipelines = self.pipelines  # `end` takes them away

        def missing() -> list[int]:
            if step <= self.generation.restore_step:
                return []
            saved = {rank for rank, pipeline in pipelines.items() if step in pipeline.saved_steps}
            return [rank for rank in self.generation.local_ranks if rank not in saved]

        def is_settled() -> bool:
            failed = any(step in pipeline.failed_steps for pipeline in pipelines.values())
            return not missing() or failed or self.generation.ended.is_set()

        with self._progress:
            self._progress.wait_for(is_settled, timeout_s)
        return missing()

    def _wait_for_progress(self, timeout_s: float) -> None:
        with self._progress:
            self._progress.wait(timeout_s)

    # --- reported by trainers and peers ---

    def receive_notice(self, notice: Notice) -> None:
        """A local trainer captured a step, could not save it, or waited for it."""
        pipeline = self.pipelines.get(notice.rank)
        if pipeline is None or notice.generation != self.generation.number:
            return
        if isinstance(notice, RestoreMoved):
            pipeline.kick()
            return
        if isinstance(notice, ReplayEqual):
            self._replays.equal(notice.generation, notice.step)
            return
        if isinstance(notice, ReplayDiffered):
            found = notice.found
            if (found.job, found.generation, found.rank) == (notice.job, notice.generation, notice.rank):
                self._note_replay(found)
            return
        self.coordination.receive_notice(notice)
        if isinstance(notice, SaveAborted):
            pipeline.fail(notice.step, notice.message)
        elif isinstance(notice, SaveWaited):
            if notice.waited_s >= LATE_S:
                self._counters.add("saves_late")
                self._late_saves.note(notice, self._clock.wall_s())
        else:
            pipeline.kick()
            self.durable.captured(notice.rank, notice.step)

    def peer_is_up(self, host_id: str) -> None:
        """A connection to this host was made, for the first time or again."""
        if host_id not in self.generation.linked_hosts:
            return
        self.coordination.peer_is_up(host_id)
        if host_id in self.generation.replica_hosts:
            for pipeline in list(self.pipelines.values()):
                pipeline.peer_is_back(host_id)

    # --- called by its own threads ---

    def _receive_seals(self, report: TierReport) -> None:
        self.coordination.receive_seals(report)

    def _report_rank(self, rank: int) -> None:
        pipeline = self.pipelines.get(rank)
        if pipeline is not None:
            with self._reporting:  # a report replaces the one before, so they must not overtake each other
                report = pipeline.report(self.durable.reports(rank))
                self.coordination.report(report)
                self._save_failures.kept(rank, max(report.saved, default=-1), self._clock.wall_s())
        with self._progress:
            self._progress.notify_all()

    def _passed_by(self, rank: int, step: int) -> None:
        pipeline = self.pipelines.get(rank)
        if pipeline is not None and step not in pipeline.saved_steps:
            pipeline.fail(step, f"Rank {rank} was already past step {step} when it received the order to save it.")

    def _give_up_emergency(self, steps: Mapping[int, int]) -> None:
        """These ranks will not save these steps. That frees the slots of ranks that did."""
        factor = factor_of(self.coordination.world.present.pace)
        for rank, step in steps.items():
            pipeline = self.pipelines.get(rank)
            if pipeline is not None and not is_due(self.generation.configure.spec, step, factor=factor):
                pipeline.fail(step, f"The emergency checkpoint at step {step} was given up.")

    def _note_compared(self, differing: DifferingLog, step: int, found: StoragePlan) -> None:
        number, restored = self.generation.number, self.generation.restore_step
        for report in differing.note(number, restored, step, found, self._clock.wall_s()):
            log.warning(
                "replicas_differ",
                job=self.generation.job,
                step=step,
                tensors=list(report.tensors),
                count=report.count,
                agree=list(report.agree),
                differ=list(report.differ),
                equal_step=report.equal_step,
            )

    def _note_replay(self, found: ReplayDiffers) -> None:
        self._counters.add("replays_differ")
        self._replays.differed(found)
        log.warning("replay_differs", **{key: value for key, value in msgspec.structs.asdict(found).items()})

    def _note_failure(self, note: Callable[[SaveFailure], None], rank: int, step: int, message: str) -> None:
        generation = self.generation
        note(SaveFailure(generation.job, generation.number, rank, step, message, at=self._clock.wall_s()))
