"""Ticks for the coordinator if a tier has an interval in seconds: the time, and the ranks' positions."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.rules.save_pace import factor_of
from ckpt_engine.rules.save_schedule import interval_s, is_due
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.worker_thread import WorkerThread
from ckpt_engine.world.coordination import Coordination

TICK_S = 0.05


class SaveClock:
    """A thread for the life of one generation. On every host it also detects ranks that passed a named step: the name
    may arrive late, and some scripts do not call `save` at every step."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        memory: MemoryTier,
        coordination: Coordination,
        counters: Counters,
        on_passed_by: Callable[[int, int], None],
    ) -> None:
        """`on_passed_by(rank, step)` is called once for a rank that will never have the step."""
        self._generation = generation
        self._memory = memory
        self._coordination = coordination
        self._on_passed_by = on_passed_by
        self._reported: dict[int, int] = {}  # rank -> the newest step that it passed by
        self._thread = WorkerThread(
            f"{generation.job}-clock",
            self.tick,
            stopped=generation.ended,
            counters=counters,
            context={"job": generation.job},
            retry_s=TICK_S,
        )

    def start(self) -> None:
        """Run until the generation ends. Does nothing if all intervals are in steps."""
        if interval_s(self._generation.configure.spec) > 0:
            self._thread.start()

    def tick(self) -> float:
        """Look at the ranks once; the thread does so again and again. Returns the seconds until then."""
        self._coordination.tick(max(map(self._look_at, self._generation.local_ranks), default=-1))
        return TICK_S

    def _look_at(self, rank: int) -> int:
        """The rank's position. Reports it if it is past a named step that it does not have."""
        generation = self._generation
        with self._memory.using(rank) as entry:
            if entry is None:
                return -1
            control = entry.segments.control
            position, named = control.position(generation.number), control.next_save(generation.number)
            factor = factor_of(control.pace(generation.number))
            slots = {(view.generation, view.step) for view in entry.segments.slots()}
            is_open = control.read_world().step < named < position
        has_it = (generation.number, named) in slots or is_due(generation.configure.spec, named, factor=factor)
        if is_open and not has_it and self._reported.get(rank, -1) < named:
            self._reported[rank] = named
            self._on_passed_by(rank, named)
        return position
