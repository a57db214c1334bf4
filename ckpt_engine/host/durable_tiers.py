"""The disk tiers of one job during one generation: which there are, their schedules, and the threads that write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from ckpt_engine.host.context import Services
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.opening import open_disk, open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.writing.store_look import StoreLook
from ckpt_engine.tiers.writing.tier_schedule import TierSchedule
from ckpt_engine.tiers.writing.tier_writer import DiskWriter, OnFailure
from ckpt_engine.tiers.writing.world_sealer import WorldSealer
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier


def open_disks(generation: HostGeneration, services: Services) -> dict[Tier, ShardStore]:
    """The tiers that the job's settings switch on. Raises ConfigurationError for a place that cannot be one."""
    spec, job, run, settings = generation.configure.spec, generation.job, generation.run, services.settings
    disks: dict[Tier, ShardStore] = {}
    if spec.policy(Tier.DISK).is_on:
        limit = services.rate_limits.get(Tier.DISK)
        folder = spec.disk_folder(services.state_dir)
        disks[Tier.DISK] = open_disk(
            folder, job=job, run=run, host_id=services.host_id, settings=settings, rate_limit=limit
        )
    if spec.policy(Tier.PERSISTENT).is_on:
        limit = services.rate_limits.get(Tier.PERSISTENT)
        disks[Tier.PERSISTENT] = open_persistent(
            spec.persistent_dir,
            job=job,
            run=run,
            settings=settings,
            rate_limit=limit,
            ranks=generation.local_ranks,
        )
    return disks


class DurableTiers:
    """Writers for every local rank and tier; on the coordinator's host the schedules and the sealers as well."""

    def __init__(
        self,
        generation: HostGeneration,
        services: Services,
        *,
        memory: MemoryTier,
        on_failure: OnFailure,
        on_progress: Callable[[int], None],
        on_sealed: Callable[[TierReport], None],
    ) -> None:
        """`on_progress(rank)` whenever a report of the rank changed; `on_sealed`, for the coordinator alone, what is
        sealed."""
        self.disks = open_disks(generation, services)
        self._looks = [StoreLook(disk, services.counters) for disk in self.disks.values()]
        self.schedules: list[TierSchedule] = []
        self._writers = [
            DiskWriter(
                rank,
                generation=generation,
                memory=memory,
                disk=disk,
                counters=services.counters,
                in_touch=services.in_touch,
                stored_points=services.stored_points,
                on_failure=on_failure,
                on_progress=on_progress,
            )
            for rank in generation.local_ranks
            for disk in self.disks.values()
        ]
        self._sealers: list[WorldSealer] = []
        if generation.coordinates:
            self.schedules = [_make_schedule(tier, generation, services.clock.monotonic_s()) for tier in self.disks]
            self._sealers = [
                WorldSealer(
                    generation,
                    disk,
                    counters=services.counters,
                    settings=services.settings,
                    clock=services.clock,
                    on_report=on_sealed,
                    on_failure=on_failure,
                )
                for tier, disk in self.disks.items()
                if tier is Tier.PERSISTENT
            ]

    @property
    def _threads(self) -> list[DiskWriter | WorldSealer]:
        return [*self._writers, *self._sealers]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End each after what it is writing, for which there is no bandwidth limit any more."""
        for disk in self.disks.values():
            disk.throttle.lift()
        for thread in self._threads:
            thread.stop()

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is waiting or being written; False if that took too long. On the monotonic clock."""
        with self.in_haste():
            return all([thread.drain(max(deadline_s - time.monotonic(), 0.0)) for thread in self._threads])

    @contextmanager
    def in_haste(self) -> Iterator[None]:
        """Write without the bandwidth limits, also what waits for one at this moment."""
        with ExitStack() as lifted:
            for disk in self.disks.values():
                lifted.enter_context(disk.throttle.lifted())
            yield

    def hear(self, namings: tuple[TierNaming, ...]) -> None:
        """What the coordinator said. Does not block."""
        for writer in self._writers:
            for naming in namings:
                if naming.tier is writer.tier:
                    writer.hear(naming)

    def told(self, copies: Iterable[ShardCopy]) -> None:
        """The supervisor is told of these copies. Does not block."""
        steps: dict[tuple[Tier, int], set[int]] = {}
        for copy in copies:
            steps.setdefault((copy.tier, copy.rank), set()).add(copy.step)
        for writer in self._writers:
            writer.told(frozenset(steps.get((writer.tier, writer.rank), ())))

    def captured(self, rank: int, step: int) -> None:
        """A local trainer's slot holds this step whole. Does not block."""
        for writer in self._writers:
            if writer.rank == rank:
                writer.captured(step)

    def seal(self, tier: Tier, step: int) -> None:
        """Every rank has written this step; for the coordinator."""
        for sealer in self._sealers:
            if sealer.tier is tier:
                sealer.seal(step)

    def reports(self, rank: int) -> tuple[TierReport, ...]:
        """How a local rank stands with each tier that was looked at by now."""
        reports = [writer.report for writer in self._writers if writer.rank == rank]
        return tuple(report for report in reports if report is not None)

    def newest(self, lineage: Lineage) -> dict[Tier, int]:
        """By tier the newest step that every local rank has there (and, where this host knows, that is sealed)."""
        newest: dict[Tier, int] = {}
        for tier, disk in self.disks.items():
            held = [set(disk.held(rank, lineage)) for rank in {writer.rank for writer in self._writers}]
            common = set.intersection(*held) if held else set()
            if any(sealer.tier is tier for sealer in self._sealers):
                common &= set(disk.sealed_steps(lineage))
            newest[tier] = max(common, default=-1)
        return newest

    def gave_up(self, tier: Tier, step: int) -> bool:
        """Whether some local rank could not write the step, and will not try again."""
        reports = [report for writer in self._writers if writer.tier is tier and (report := writer.report)]
        return any(report.settled >= step and max(report.present, default=-1) < step for report in reports)

    def scan(self, deadline_s: float) -> None:
        """Look at the folders again, as far as the time allows; they may hang."""
        for look, asked in [(look, look.ask()) for look in self._looks]:
            look.wait(asked, deadline_s)


def _make_schedule(tier: Tier, generation: HostGeneration, now_s: float) -> TierSchedule:
    return TierSchedule(
        tier,
        policy=generation.configure.spec.policy(tier),
        world_size=generation.placement.world_size,
        restore_step=generation.restore_step,
        sealed=tier is Tier.PERSISTENT,
        now_s=now_s,
    )
