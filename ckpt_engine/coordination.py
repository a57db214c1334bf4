"""How the world step of one generation gets from the ranks to the coordinator and back into every control segment."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from ckpt_engine.coordinator import Coordinator
from ckpt_engine.generation import Generation, WorldView
from ckpt_engine.links import PeerLinks
from ckpt_engine.peer_wire import RankSteps, Verdict, WorldStep
from ckpt_engine.tiers.memory import MemoryTier

log = structlog.get_logger()


class Coordination:
    """One engine's part in it. On rank 0's host it decides, on the others it reports and obeys."""

    def __init__(
        self, generation: Generation, *, memory: MemoryTier, links: PeerLinks, on_advance: Callable[[], None]
    ) -> None:
        """Begins at the restore step, or where the control words of this very generation stand: then this engine was
        restarted. `on_advance` is called after the world step moved."""
        self._generation = generation
        self._memory = memory
        self._links = links
        self._on_advance = on_advance
        self._lock = threading.Lock()
        self._reports: dict[int, RankSteps] = {}  # of local ranks, for a coordinator that comes back
        start = self._begin_words()
        self.world = WorldView(start)
        self._coordinator: Coordinator | None = None
        if generation.coordinates:
            self._coordinator = Coordinator(
                generation=generation.number,
                world_size=generation.placement.world_size,
                world_step=start.world_step,
                abandoned=start.abandoned,
            )

    def report(self, rank: int, saved: tuple[int, ...], failed: tuple[int, ...]) -> None:
        """A local rank has these steps, and will never have those."""
        generation = self._generation
        steps = RankSteps(generation.job, generation.number, rank, saved, failed)
        with self._lock:
            self._reports[rank] = steps
        if generation.coordinates:
            self.hear_rank(steps)
        else:
            self._links.post(generation.coordinator_host, (generation.job, rank), steps)

    def hear_rank(self, steps: RankSteps) -> Verdict:
        """What a rank, here or elsewhere, has; for the coordinator."""
        verdict = self._judge(steps.generation)
        if verdict is not Verdict.OK:
            return verdict
        if self._coordinator is None or steps.rank >= self._generation.placement.world_size:
            return Verdict.ERROR
        with self._lock:
            changed = self._coordinator.saved(steps.rank, sorted(steps.saved))
            changed = self._coordinator.failed(steps.failed) or changed
            world = self._world_of(self._coordinator)
            if changed:
                for host_id in self._generation.linked_hosts:
                    self._links.post(host_id, (self._generation.job, "world"), world)
        if changed:
            self.hear_world(world)
        return Verdict.OK

    def hear_world(self, world: WorldStep) -> Verdict:
        """What the coordinator decided: into the control words of the local ranks."""
        verdict = self._judge(world.generation)
        if verdict is not Verdict.OK:
            return verdict
        before = self.world.present.world_step
        with self._lock:
            if self.world.learn(world):
                self._write_words(self.world.present)
        if self.world.present.world_step > before:
            self._on_advance()
        return Verdict.OK

    def peer_is_up(self, host_id: str) -> None:
        """A connection to this host was made: tell it what it may have missed."""
        generation = self._generation
        with self._lock:
            if self._coordinator is not None:
                self._links.post(host_id, (generation.job, "world"), self._world_of(self._coordinator))
            elif host_id == generation.coordinator_host:
                for rank, steps in self._reports.items():
                    self._links.post(host_id, (generation.job, rank), steps)

    def _judge(self, generation: int) -> Verdict:
        if generation > self._generation.number:
            return Verdict.BUSY  # this host hears of it in a moment
        return Verdict.OK if generation == self._generation.number else Verdict.STALE

    def _world_of(self, coordinator: Coordinator) -> WorldStep:
        return WorldStep(self._generation.job, coordinator.generation, coordinator.world_step, coordinator.abandoned)

    def _begin_words(self) -> WorldStep:
        generation = self._generation
        world_step, abandoned = generation.restore_step, frozenset[int]()
        for rank in generation.local_ranks:
            with self._memory.using(rank, create=True) as entry:
                if entry is None:
                    continue
                control = entry.segments.control
                fence = generation.configure.fence
                control.write_fence(fence.epoch, generation.number)
                words = control.read_world()
                if words.generation == generation.number:
                    world_step, abandoned = max(world_step, words.step), abandoned | words.abandoned
                else:
                    control.begin_world(generation.number, generation.restore_step)
        return WorldStep(
            generation.job, generation.number, world_step, tuple(sorted(s for s in abandoned if s > world_step))
        )

    def _write_words(self, world: WorldStep) -> None:
        for rank in self._generation.local_ranks:
            with self._memory.using(rank) as entry:
                if entry is None:
                    continue
                control = entry.segments.control
                if control.read_world().generation != world.generation:
                    continue  # a newer generation has begun
                control.advance_world(world.world_step)
                for step in sorted(set(world.abandoned) - control.read_world().abandoned):
                    control.abandon(step)
