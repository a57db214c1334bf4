"""Carries the ranks' reports to the coordinator, and the world step back into every control segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import structlog

from ckpt_engine.contracts.control_views import NOTHING_KEPT, KeptStep
from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.notices import Captured, Notice, SaveWaited
from ckpt_engine.contracts.peer_wire import SavedSteps, ShardVerdict, TierNaming, TierReport, WorldStep
from ckpt_engine.counters import Counters
from ckpt_engine.peers.links import Key, PeerLinks
from ckpt_engine.rules.coordinator import Coordinator
from ckpt_engine.rules.save_pace import SavePace, factor_of
from ckpt_engine.rules.save_schedule import SaveSchedule, interval_s, interval_steps
from ckpt_engine.rules.tier_schedule import TierSchedule
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.checkpoints import SaveInterval, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.identity import MAX_DURATION_S, MAX_STEP

log = structlog.get_logger()


class Coordination:
    """One engine's part in one generation. On rank 0's host it decides; on the others it reports and obeys."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        memory: MemoryTier,
        links: PeerLinks,
        counters: Counters,
        clock: Clock,
        on_advance: Callable[[], None],
        on_naming: Callable[[tuple[TierNaming, ...]], None],
        on_written: Callable[[Tier, int], None],
        schedules: Sequence[TierSchedule] = (),
    ) -> None:
        """Starts at the restore step or, after an engine restart, where this generation's control words stand.

        `on_advance` is called after the world step moved. `on_naming` is called with the steps that the disk tiers have
        to write and keep, before the control words show the new world step; it must not block. On the coordinator's
        host, `on_written` is called when every rank has written a step that still needs its world manifest. `schedules`
        are the coordinator's."""
        self._generation = generation
        self._memory = memory
        self._links = links
        self._counters = counters
        self._clock = clock
        self._on_advance = on_advance
        self._on_naming = on_naming
        self._on_written = on_written
        self._lock = threading.Lock()
        self._reports: dict[int, SavedSteps] = {}  # of local ranks, to send again when the coordinator is back
        self._flush_step = -1  # this host wants it in the disk tiers, out of schedule
        start = self._begin_words()
        self.world = WorldView(start)
        self._coordinator: Coordinator | None = None
        if generation.coordinates:
            self._coordinator = Coordinator(
                start,
                world_size=generation.placement.world_size,
                schedules=schedules,
                saves=self._make_save_schedule(start),
                pace=self._make_save_pace(start),
            )

    def _make_save_schedule(self, start: WorldStep) -> SaveSchedule | None:
        every_s = interval_s(self._generation.configure.spec)
        if every_s == 0:
            return None
        return SaveSchedule(
            every_s,
            named=max(start.next_save, self._generation.restore_step),
            world_step=start.world_step,
            now_s=self._clock.monotonic_s(),
        )

    def _make_save_pace(self, start: WorldStep) -> SavePace | None:
        spec = self._generation.configure.spec
        every_steps = interval_steps(spec)
        return SavePace(every_steps, start.pace) if every_steps > 0 and spec.adapt_interval else None

    def report(self, steps: SavedSteps) -> None:
        """Send the report of a local rank to the coordinator."""
        with self._lock:
            self._reports[steps.rank] = msgspec.structs.replace(steps, flush=self._flush_step)
        self._send(steps.rank)

    def want_flush(self, step: int) -> None:
        """Have all ranks write this step, or a newer one, to the disk tiers, out of schedule."""
        with self._lock:
            if step <= self._flush_step:
                return
            self._flush_step = step
            for rank, report in self._reports.items():
                self._reports[rank] = msgspec.structs.replace(report, flush=step)
        for rank in self._generation.local_ranks:
            self._send(rank)

    def _send(self, rank: int) -> None:
        """Send the newest report. It replaces one that the coordinator has not received yet."""
        generation = self._generation
        with self._lock:
            steps = self._reports.get(rank)
            if steps is not None and not generation.coordinates:
                self._post(generation.coordinator_host, (generation.job, rank), steps)
        if steps is not None and generation.coordinates:
            self.receive_steps(steps, generation.host_id)

    def receive_steps(self, steps: SavedSteps, sender: str) -> ShardVerdict:
        """A report of any rank, for the coordinator. It counts only from the rank's own host."""
        verdict = self._judge(steps.generation)
        if verdict is not ShardVerdict.OK:
            return verdict
        if self._coordinator is None:
            return ShardVerdict.ERROR
        if self._generation.host_of(steps.rank) != sender:
            return ShardVerdict.FOREIGN
        coordinator = self._coordinator
        with self._lock:
            coordinator.now_s = self._clock.monotonic_s()
            pace = coordinator.pace.word if coordinator.pace is not None else 0
            changed = coordinator.tiers_reported(steps.rank, steps.tiers)
            changed = coordinator.saved(steps.rank, sorted(steps.saved)) or changed
            changed = coordinator.failed(steps.failed) or changed
            changed = (steps.saving >= 0 and coordinator.saving(steps.rank, steps.saving)) or changed
            changed = coordinator.flush_wanted(steps.flush) or changed
            self._log_skipped(coordinator.take_skipped(), steps.rank)
            self._log_pace(coordinator.pace, pace)
            advanced = changed and self._decide_locked(coordinator)
            to_seal = coordinator.to_seal
        self._follow_up(advanced, to_seal)
        return ShardVerdict.OK

    def receive_seals(self, report: TierReport) -> None:
        """The world manifests that exist, from the sealer on the coordinator's host."""
        if self._coordinator is None:
            return
        with self._lock:
            self._coordinator.now_s = self._clock.monotonic_s()
            advanced = self._coordinator.seals_reported(report) and self._decide_locked(self._coordinator)
            to_seal = self._coordinator.to_seal
        self._follow_up(advanced, to_seal)

    def tick(self, position: int) -> None:
        """Time has passed, and a rank of this host is at `position` (-1: none yet). Only the coordinator acts on it."""
        if self._coordinator is None:
            return
        with self._lock:
            self._coordinator.now_s = self._clock.monotonic_s()
            if self._coordinator.tick(position):
                self._decide_locked(self._coordinator)

    def receive_notice(self, notice: Notice) -> None:
        """A notice of rank 0, whose saves set the pace. Must come before the world can have the step."""
        if self._coordinator is None or self._coordinator.pace is None or notice.rank != 0:
            return
        with self._lock:
            if isinstance(notice, Captured):
                self._coordinator.pace.captured(notice.step, self._clock.monotonic_s(), notice.copied_s)
            elif isinstance(notice, SaveWaited):
                self._coordinator.pace.waited(notice.step, notice.waited_s)

    @property
    def save_interval(self) -> SaveInterval | None:
        """The interval between saves; None on other hosts than the coordinator's, or if it does not adapt."""
        generation = self._generation
        with self._lock:
            if self._coordinator is None or self._coordinator.pace is None:
                return None
            pace = self._coordinator.pace
            return SaveInterval(
                generation.job,
                generation.number,
                pace.interval_steps,
                min(pace.interval_steps * pace.factor, MAX_STEP),
                min(pace.cost.save_s + pace.cost.copied_s, MAX_DURATION_S),
                min(pace.cost.step_s, MAX_DURATION_S),
            )

    def _log_pace(self, pace: SavePace | None, before: int) -> None:
        if pace is None or pace.word == before:
            return
        change = "widened" if pace.factor > factor_of(before) else "narrowed"
        self._counters.add(f"save_intervals_{change}")
        log.warning(
            f"save_interval_{change}",
            job=self._generation.job,
            every_steps=pace.interval_steps * pace.factor,
            wanted_steps=pace.interval_steps,
            save_s=round(pace.cost.save_s, 3),
            step_s=round(pace.cost.step_s, 6),
        )

    def _log_skipped(self, steps: list[int], rank: int) -> None:
        """The whole world skips these steps."""
        if steps:
            self._counters.add("steps_skipped", len(steps))
            log.warning("steps_skipped", job=self._generation.job, steps=steps, reported_by_rank=rank)

    def _follow_up(self, advanced: bool, to_seal: dict[Tier, int]) -> None:
        if advanced:
            self._on_advance()
        for tier, step in to_seal.items():
            self._on_written(tier, step)

    def _decide_locked(self, coordinator: Coordinator) -> bool:
        """Send the decision to all hosts. It is in this host's control words first, so a restarted engine cannot decide
        otherwise. Returns whether the world step moved."""
        world = coordinator.world
        advanced = self._learn_locked(world)
        for host_id in self._generation.linked_hosts:
            self._post(host_id, (self._generation.job, "world"), world)
        return advanced

    def receive_world(self, world: WorldStep, sender: str) -> ShardVerdict:
        """Apply a decision of the coordinator to the local ranks' control words. It counts only from rank 0's host."""
        verdict = self._judge(world.generation)
        if verdict is not ShardVerdict.OK:
            return verdict
        if sender != self._generation.coordinator_host:
            return ShardVerdict.FOREIGN
        with self._lock:
            advanced = self._learn_locked(world)
        self._follow_up(advanced, {})
        return ShardVerdict.OK

    def _learn_locked(self, world: WorldStep) -> bool:
        before = self.world.present.world_step
        if self.world.learn(world):
            self._on_naming(self.world.present.tiers)  # first: a named step must not be overwritten
            self._write_words(self.world.present)
        return self.world.present.world_step > before

    def repeat(self) -> None:
        """Call `on_naming` again, for writers that were not there yet, and write the control words that a killed engine
        did not get to."""
        with self._lock:
            self._on_naming(self.world.present.tiers)
            self._write_words(self.world.present)

    def peer_is_up(self, host_id: str) -> None:
        """A connection to this host was made: send what it may have missed."""
        generation = self._generation
        with self._lock:
            if self._coordinator is not None:
                self._post(host_id, (generation.job, "world"), self._coordinator.world)
            elif host_id == generation.coordinator_host:
                for rank, steps in self._reports.items():
                    self._post(host_id, (generation.job, rank), steps)

    def _post(self, host_id: str, key: Key, message: SavedSteps | WorldStep) -> None:
        # Nobody wants messages of an ended generation, and nobody accepts those of an ended job.
        self._links.post(host_id, key, message, unless=self._generation.ended.is_set)

    def _judge(self, generation: int) -> ShardVerdict:
        if generation > self._generation.number:
            return ShardVerdict.BUSY  # its Configure is on its way here
        return ShardVerdict.OK if generation == self._generation.number else ShardVerdict.STALE

    def _begin_words(self) -> WorldStep:
        generation = self._generation
        world_step, abandoned, upto, next_save = generation.restore_step, frozenset[int](), -1, -1
        pace, kept = 0, NOTHING_KEPT
        before = self._known_before()
        for rank in generation.local_ranks:
            with self._memory.using(rank, create=True) as entry:
                if entry is None:
                    continue
                control = entry.segments.control
                fence = generation.configure.fence
                control.write_fence(fence.epoch, generation.number)
                words = control.read_world()
                if words.generation == generation.number:
                    world_step, abandoned = max(world_step, words.step), abandoned | words.abandoned.named
                    upto = max(upto, words.abandoned.upto)
                    next_save = max(next_save, control.next_save(generation.number))
                    pace = max(pace, control.pace(generation.number))
                    kept = max(kept, words.kept, key=lambda found: (found.is_sure, found.step))
                    control.release_holds()  # of a killed engine
                else:
                    kept = KeptStep(before, is_sure=generation.coordinates)
                    control.begin_world(generation.number, generation.restore_step, kept)
        alive = tuple(sorted(step for step in abandoned if step > world_step))
        return WorldStep(
            generation.job,
            generation.number,
            world_step,
            alive,
            next_save=next_save,
            abandoned_upto=upto,
            pace=pace,
            kept=kept.step,
            kept_is_sure=kept.is_sure,
        )

    def _known_before(self) -> int:
        """The newest step before the restored one of which this host knows, from an earlier generation, that all ranks
        and their peers had it; -1 for none, or if it is the restored one itself."""
        generation, found = self._generation, -1
        if not generation.replica_hosts or generation.restored_world_size != generation.placement.world_size:
            return found
        for rank in generation.local_ranks:
            with self._memory.using(rank, create=True) as entry:
                words = entry.segments.read_world() if entry is not None else None
            if words is not None and words.generation < generation.number:
                found = max(found, words.kept.step if words.kept.step >= 0 else words.step)
        return found if found < generation.restore_step else -1

    def _write_words(self, world: WorldStep) -> None:
        for rank in self._generation.local_ranks:
            with self._memory.using(rank) as entry:
                if entry is None:
                    continue
                control = entry.segments.control
                if control.read_world().generation != world.generation:
                    continue  # a newer generation has begun
                control.advance_world(world.world_step)
                control.keep(world.kept_step)
                control.name_save(world.next_save)
                control.set_pace(world.pace)
                control.abandon(world.abandoned, world.abandoned_upto)
