"""The disk tiers of one job during one generation: which there are, their schedules, and the threads that write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.peers.cohort_shards import CohortShards
from ckpt_engine.rules.retention_rules import newest_that_fit
from ckpt_engine.rules.tier_schedule import StepMarks, TierSchedule
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import JobSlots, MemoryTier
from ckpt_engine.tiers.opening import open_disk, open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.storing_across_hosts import OnCompared, StoringAcrossHosts
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from ckpt_engine.tiers.writing.tier_retention import TierRetention
from ckpt_engine.tiers.writing.tier_writer import DiskWriter, OnFailure
from ckpt_engine.tiers.writing.world_sealer import WorldSealer
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import CheckpointSpec, JobHistory, Lineage, ShardCopy, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()

REPORTED_STEPS = 16  # the newest of each disk tier: it may keep more for ever, and a message has a size limit
_LEFT_COPIES = 6000  # of each disk tier, for the same reason: of a shared store, a host lists the copies of all ranks


def open_disks(
    spec: CheckpointSpec, *, job: str, run: str, host: EngineHost, ranks: Collection[int]
) -> dict[Tier, ShardStore]:
    """The tiers that the job's settings switch on. `ranks`: as in `ShardStore`. Raises ConfigurationError for an
    unusable folder or URL."""
    disks: dict[Tier, ShardStore] = {}
    if spec.policy(Tier.DISK).is_on:
        disks[Tier.DISK] = open_disk(
            spec.disk_folder(host.state_dir),
            job=job,
            run=run,
            host_id=host.host_id,
            settings=host.settings,
            rate_limit=host.rate_limits.get(Tier.DISK),
        )
    if spec.policy(Tier.PERSISTENT).is_on:
        disks[Tier.PERSISTENT] = open_persistent(
            spec.persistent_dir,
            job=job,
            run=run,
            settings=host.settings,
            rate_limit=host.rate_limits.get(Tier.PERSISTENT),
            ranks=ranks,
        )
    return disks


def left_copies(job: str, history: JobHistory, host: EngineHost) -> list[ShardCopy]:
    """The newest copies that this host and the store still have of a job that does not run here (any more).
    Raises if one place cannot be read: with half an answer the job would go on from an older step."""
    slots = JobSlots(host.shm_prefix, job, host.host_id, SegmentOptions.of(host.settings))
    slots.use_run(history.run)
    try:
        found = slots.copies()
    finally:
        slots.close()
    for disk in open_disks(history.spec, job=job, run=history.run, host=host, ranks=()).values():
        disk.scan()
        found += newest_that_fit(disk.newest_copies(history.lineage, REPORTED_STEPS), _LEFT_COPIES)
    return found


class DurableTiers:
    """One writer per local rank and tier. On the coordinator's host also the schedules and the sealers."""

    def __init__(
        self,
        generation: HostGeneration,
        host: EngineHost,
        *,
        memory: MemoryTier,
        contact: DaemonContact,
        clock: Clock,
        counters: Counters,
        on_failure: OnFailure,
        on_compared: OnCompared,
        on_compared_across: OnCompared,
        marks: StepMarks,
        on_progress: Callable[[int], None],
        on_sealed: Callable[[TierReport], None],
        cohort: CohortShards,
        coordinator_down_s: Callable[[], float],
    ) -> None:
        """`on_compared` is called with what ranks of this host hold alike, `on_compared_across` with what those of
        several do; `on_progress(rank)` whenever a report of the rank changed; `on_sealed` on the coordinator's host
        whenever the sealed steps did. `marks`: which steps are suspect. `coordinator_down_s()`: for how long the
        coordinator's host has been unreachable."""
        self.disks = open_disks(
            generation.configure.spec,
            job=generation.job,
            run=generation.run,
            host=host,
            ranks=generation.stored_ranks,
        )
        self._scans = [_StoreScan(disk, counters) for disk in self.disks.values()]
        self.schedules: list[TierSchedule] = []
        if generation.coordinates:
            now_s = clock.monotonic_s()
            self.schedules = [_make_schedule(tier, generation, now_s, marks) for tier in self.disks]

        def make_across(tier: Tier, disk: ShardStore) -> StoringAcrossHosts | None:
            if tier is not Tier.PERSISTENT or len(generation.local_ranks) == generation.placement.world_size:
                return None
            return StoringAcrossHosts(
                generation,
                cohort,
                memory=memory,
                disk=disk,
                counters=counters,
                coordinator_down_s=coordinator_down_s,
                on_compared=on_compared,
                on_compared_across=on_compared_across,
                on_vote=on_progress,
            )

        self._together = {
            tier: StoringTogether(
                generation,
                memory=memory,
                disk=disk,
                counters=counters,
                on_compared=on_compared,
                across=make_across(tier, disk),
            )
            for tier, disk in self.disks.items()
        }
        self._writers = [
            DiskWriter(
                rank,
                generation=generation,
                memory=memory,
                disk=disk,
                counters=counters,
                retention=TierRetention(
                    generation,
                    disk,
                    rank=rank,
                    counters=counters,
                    in_touch=contact.in_touch,
                    stored_points=contact.stored_points,
                    monotonic_s=clock.monotonic_s,
                    on_spared=self._on_spared(rank, tier),
                ),
                together=self._together[tier],
                on_failure=on_failure,
                on_progress=on_progress,
            )
            for rank in generation.local_ranks
            for tier, disk in self.disks.items()
        ]
        self._sealers: list[WorldSealer] = []
        if generation.coordinates:
            self._sealers = [
                WorldSealer(
                    generation,
                    disk,
                    counters=counters,
                    settings=host.settings,
                    clock=clock,
                    on_report=on_sealed,
                    on_failure=on_failure,
                )
                for tier, disk in self.disks.items()
                if tier is Tier.PERSISTENT
            ]

    def _on_spared(self, rank: int, tier: Tier) -> Callable[[frozenset[int]], None]:
        """Where the coordinator's own rank says what the supervisor may know; the other ranks say it to nobody."""
        if rank == 0:
            for schedule in self.schedules:
                if schedule.tier is tier:
                    return schedule.spare
        return lambda spared: None

    @property
    def _workers(self) -> list[DiskWriter | WorldSealer]:
        return [*self._writers, *self._sealers]

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """End each worker after its current write, which goes on without bandwidth limit. Does not block."""
        for disk in self.disks.values():
            disk.throttle.lift()
        for worker in self._workers:
            worker.stop()
        for together in self._together.values():
            together.stop()

    def drain(self, deadline_s: float) -> bool:
        """Wait until all writes are done; False if the deadline (monotonic) came first."""
        with self.in_haste():
            return all([worker.drain(max(deadline_s - time.monotonic(), 0.0)) for worker in self._workers])

    @contextmanager
    def in_haste(self) -> Iterator[None]:
        """Lift the bandwidth limits, also for writes that are waiting for one."""
        with ExitStack() as lifted:
            for disk in self.disks.values():
                lifted.enter_context(disk.throttle.lifted())
            yield

    def receive(self, namings: tuple[TierNaming, ...]) -> None:
        """The coordinator named these steps. Does not block."""
        for writer in self._writers:
            for naming in namings:
                if naming.tier is writer.tier:
                    writer.receive(naming)

    def note_reported(self, copies: Iterable[ShardCopy]) -> None:
        """These copies are being reported to the supervisor. Does not block."""
        steps: dict[tuple[Tier, int], set[int]] = {}
        for copy in copies:
            steps.setdefault((copy.tier, copy.rank), set()).add(copy.step)
        for writer in self._writers:
            writer.note_reported(frozenset(steps.get((writer.tier, writer.rank), ())))

    def captured(self, rank: int, step: int) -> None:
        """A local trainer's slot holds the whole step. Does not block."""
        for writer in self._writers:
            if writer.rank == rank:
                writer.captured(step)

    def seal(self, tier: Tier, step: int) -> None:
        """Every rank has written this step. Called on the coordinator's host."""
        for sealer in self._sealers:
            if sealer.tier is tier:
                sealer.seal(step)

    def reports(self, rank: int) -> tuple[TierReport, ...]:
        """The state of each tier that this rank's writer has scanned by now."""
        reports = [writer.report for writer in self._writers if writer.rank == rank]
        return tuple(report for report in reports if report is not None)

    def newest(self, lineage: Lineage) -> dict[Tier, int]:
        """By tier the newest step that every local rank has there. On the coordinator's host a step of the persistent
        tier must also be sealed."""
        newest: dict[Tier, int] = {}
        for tier, disk in self.disks.items():
            held = [set(disk.held(rank, lineage)) for rank in {writer.rank for writer in self._writers}]
            common = set.intersection(*held) if held else set()
            if any(sealer.tier is tier for sealer in self._sealers):
                common &= set(disk.sealed_steps(lineage))
            newest[tier] = max(common, default=-1)
        return newest

    def gave_up(self, tier: Tier, step: int) -> bool:
        """Whether some local rank failed to write the step, and will not try again."""
        reports = [report for writer in self._writers if writer.tier is tier and (report := writer.report)]
        return any(report.settled >= step and max(report.present, default=-1) < step for report in reports)

    def scan(self, deadline_s: float) -> None:
        """Scan the folders again, until the deadline at most (monotonic): they may hang."""
        for scan, request in [(scan, scan.request()) for scan in self._scans]:
            scan.wait(request, deadline_s)


class _StoreScan:
    """Scans one store on request, in one thread at a time. A shared folder that hangs blocks one thread, no matter how
    often a scan is requested."""

    def __init__(self, disk: ShardStore, counters: Counters) -> None:
        self._disk = disk
        self._counters = counters
        self._requested = 0
        self._done = 0  # the newest request made before a scan that has ended
        self._scanning = False
        self._changed = threading.Condition()

    def request(self) -> int:
        """Have a scan begin after this moment. Returns a ticket for `wait`."""
        with self._changed:
            self._requested += 1
            if not self._scanning:
                WorkerThread(f"scan-{self._disk.tier}", self._scan, counters=self._counters).start()
                self._scanning = True
            return self._requested

    def wait(self, request: int, deadline_s: float) -> bool:
        """Wait for the requested scan to end, well or not; False at the deadline (monotonic)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= request, max(deadline_s - time.monotonic(), 0.0))

    def _scan(self) -> float | None:
        with self._changed:
            if self._done == self._requested:
                self._scanning = False
                return None
            requested = self._requested
        try:
            self._disk.scan()
        except (FlyballError, OSError) as error:  # the last listing stays
            log.warning("disk_not_scanned", tier=str(self._disk.tier), reason=str(error))
        finally:
            with self._changed:
                self._done = requested
                self._changed.notify_all()
        return 0.0


def _make_schedule(tier: Tier, generation: HostGeneration, now_s: float, marks: StepMarks) -> TierSchedule:
    return TierSchedule(
        tier,
        policy=generation.configure.spec.policy(tier),
        world_size=generation.placement.world_size,
        restore_step=generation.restore_step,
        first_step=generation.durable_from,
        sealed=tier is Tier.PERSISTENT,
        now_s=now_s,
        marks=marks,
    )
