"""How the ranks of a simulated generation write to the persistent tier: the engine's own schedule and retention decide;
only the writing is simulated.

Rank 0's host coordinates: it names a step, seals it when all ranks have written it, and says which steps stay. Engines
go on after the ranks' end, until their host is told to stop or to start a newer generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_engine.contracts.peer_wire import TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.rules.retention_rules import reported_steps
from ckpt_engine.rules.tier_schedule import TierSchedule
from ckpt_engine.tiers.writing.tier_retention import TierRetention
from flyball.contracts.checkpoints import Lineage, ShardCopy, StoredPoints, Tier
from flyball.contracts.cluster import restored_world_size
from simulator.checks.history import Sealed
from simulator.world.store import STORE, SharedStore

if TYPE_CHECKING:
    from simulator.world.training import SimulatedGeneration, SimulatedWorker

_AGAIN_S = 1.0  # after the store did not answer
_SEAL_WITHIN_S = 30.0


class StoreContact:
    """What a host's engine knows of the supervisor, and of the store."""

    def __init__(self) -> None:
        self.touched_until = 0.0
        self.stored_points: StoredPoints = {}
        self.part: EnginePart | None = None  # of the newest generation of this host
        self.listed: tuple[ShardCopy, ...] = ()  # when it last saw the store

    def begin(self, group: SimulatedGeneration, host_id: str) -> None:
        """The host begins to run ranks of a generation."""
        if self.part is None or self.part.group is not group:
            self.end(group.generation)
            self.part = EnginePart(group, host_id)

    def end(self, upto_generation: int) -> None:
        """The host was told to stop the ranks of these generations."""
        if self.part is not None and self.part.group.generation <= upto_generation:
            self.part.ended.set()

    def copies(
        self, store: SharedStore | None, *, is_reached: bool, history: Lineage | None = None
    ) -> tuple[ShardCopy, ...]:
        """What the engine reports of the store. `history`: of the job, for an engine that may not know it."""
        if store is None or not is_reached:
            return self.listed
        if history is not None:
            return store.newest_copies(history, self.part.ranks if self.part is not None else ())
        if self.part is not None:
            self.listed = store.newest_copies(self.part.lineage, self.part.ranks)
        return self.listed


class EnginePart:
    """One host's ranks of one generation. `ended`: the host was told to stop them, or went down."""

    def __init__(self, group: SimulatedGeneration, host_id: str) -> None:
        self.group = group
        placement = group.placement
        here = placement.host(host_id)
        own = here.ranks if here is not None else ()
        most = max((entry.world_size for entry in placement.lineage), default=0)
        # Rank 0's host looks after the shards of ranks that are no more.
        self.ranks = (*own, *(range(placement.world_size, most) if 0 in own else ()))
        self.lineage: Lineage = placement.lineage
        self.ended = threading.Event()


class _RankWriter:
    def __init__(self, worker: SimulatedWorker, part: EnginePart) -> None:
        self.rank, self.host_id, self.part = worker.rank, worker.host_id, part
        self.received = self.settled = -1
        self.has_looked = False
        self.retention: TierRetention


class Storing:
    """One generation's."""

    def __init__(self, group: SimulatedGeneration, store: SharedStore, restored_step: int) -> None:
        self._group, self._world, self._store, self._rng = group, group.world, store, group.world.rng
        self._lineage = group.placement.lineage
        size = group.placement.world_size
        first = restored_step + (0 if restored_world_size(group.placement) == size else 1)
        self._schedule = TierSchedule(
            Tier.PERSISTENT,
            policy=store.policy,
            world_size=size,
            restore_step=restored_step,
            first_step=max(first, 0),
            sealed=True,
            now_s=self._world.elapsed_s,
        )
        self._asked = self._settled = max(first, 0) - 1
        self._writers: dict[int, _RankWriter] = {}
        for worker in group.workers.values():
            part = self._world.hosts[worker.host_id].engine.part
            if part is None:  # its host went down and came up meanwhile
                continue
            writer = self._writers[worker.rank] = _RankWriter(worker, part)
            writer.received = writer.settled = self._asked
            writer.retention = self._retention_of(writer)
            self._world.after(self._rng.uniform(0.05, 0.5), partial(self._look, writer))

    def offer(self, step: int) -> None:
        """All ranks have committed this step."""
        self._schedule.offer((step,), self._world.elapsed_s)
        self._name()

    # --- the ranks' writers ------------------------------------------------------------------------------------------

    def _retention_of(self, writer: _RankWriter) -> TierRetention:
        engine = self._world.hosts[writer.host_id].engine
        spec = SimpleNamespace(policy=lambda tier: self._store.policy)
        generation: Any = SimpleNamespace(  # what the retention reads of it
            job=self._group.job,
            lineage=self._lineage,
            stored_ranks=[writer.rank, *(writer.part.ranks if writer.rank == 0 else ())],
            ended=writer.part.ended,
            generation_of=self._generation_of,
            configure=SimpleNamespace(spec=spec),
        )
        store: Any = self._store
        return TierRetention(
            generation,
            store,
            rank=writer.rank,
            counters=Counters(),
            in_touch=lambda: self._world.now < engine.touched_until,
            stored_points=lambda: engine.stored_points,
            monotonic_s=lambda: self._world.now,
            on_spared=self._schedule.spare if writer.rank == 0 else lambda spared: None,
        )

    def _generation_of(self, step: int) -> int:
        return next(e.generation for e in self._lineage if e.upto_step is None or step <= e.upto_step)

    def _put_off(self, writer: _RankWriter, happening: Callable[[], None]) -> bool:
        """If the writer's host does not reach the store now, postpone this."""
        host = self._world.hosts[writer.host_id]
        reaches = host.is_engine_up and not host.is_paused and self._world.network.are_joined(writer.host_id, STORE)
        if not reaches:
            self._world.after(_AGAIN_S, happening)
        return not reaches

    def _look(self, writer: _RankWriter) -> None:
        if writer.part.ended.is_set() or self._put_off(writer, partial(self._look, writer)):
            return
        writer.retention.begin()
        writer.has_looked = True
        self._report(writer)
        if writer.rank == 0:
            self._report_sealed()
        self._name()

    def _name(self) -> None:
        named = self._schedule.named
        for writer in self._writers.values():
            if writer.has_looked and writer.received < named and not writer.part.ended.is_set():
                writer.received = named
                self._world.after(self._rng.uniform(0.05, 1.5), partial(self._write, writer, named))

    def _write(self, writer: _RankWriter, step: int) -> None:
        if writer.part.ended.is_set():
            return
        mine = (Tier.MEMORY, writer.rank, self._generation_of(step), step)
        copies = self._world.hosts[writer.host_id].copies
        found = next((c for c in copies if (c.tier, c.rank, c.generation, c.step) == mine), None)
        if found is not None:  # else a newer step has its slot: it is given up
            if self._put_off(writer, partial(self._write, writer, step)):
                return
            self._store.write(msgspec.structs.replace(found, tier=Tier.PERSISTENT, host_id=""))
        writer.settled = step
        self._report(writer)
        self._seal_what_is_written()

    def _report(self, writer: _RankWriter) -> None:
        held = reported_steps(self._store.held(writer.rank, self._lineage), self._store.policy)
        self._schedule.report(writer.rank, TierReport(Tier.PERSISTENT, writer.received, writer.settled, held))

    def _prune(self, writer: _RankWriter) -> None:
        naming = self._schedule.naming
        if writer.part.ended.is_set() or naming is None or self._put_off(writer, partial(self._prune, writer)):
            return
        writer.retention.prune(naming)
        self._report(writer)

    def note_reported(self, copies: tuple[ShardCopy, ...], host_id: str) -> None:
        """A host reports these to the supervisor."""
        for writer in self._writers.values():
            if writer.host_id == host_id and not writer.part.ended.is_set():
                writer.retention.note_reported(frozenset(copy.step for copy in copies if copy.rank == writer.rank))

    # --- rank 0's host -----------------------------------------------------------------------------------------------

    def _seal_what_is_written(self) -> None:
        step, first = self._schedule.to_seal, self._writers.get(0)
        if step is not None and step > self._asked and first is not None:
            self._asked = step
            seal = partial(self._seal, first, step, self._world.now + _SEAL_WITHIN_S)
            self._world.after(self._rng.uniform(0.02, 1.0), seal)

    def _seal(self, writer: _RankWriter, step: int, until: float) -> None:
        if writer.part.ended.is_set():
            return
        again = partial(self._seal, writer, step, until)
        if self._world.now < until and self._put_off(writer, again):
            return
        generation, size = self._generation_of(step), self._group.placement.world_size
        if self._world.now < until and self._store.seal(generation, step, size):
            self._world.note(Sealed(self._world.now, self._group.job, generation, step))
        self._settled = step
        self._report_sealed()
        for other in self._writers.values():
            self._world.after(self._rng.uniform(0.02, 0.5), partial(self._prune, other))

    def _report_sealed(self) -> None:
        sealed = reported_steps(self._store.sealed_steps(self._lineage), self._store.policy)
        self._schedule.seal_report(TierReport(Tier.PERSISTENT, self._asked, self._settled, sealed))
