"""A job's present generation, as one engine sees it."""

from __future__ import annotations

import threading
from functools import cached_property

from ckpt_engine.contracts import peer_plan as peers
from ckpt_engine.contracts.peer_wire import StorageDecision, TierNaming, WorldStep
from flyball.contracts.checkpoints import Lineage, RestorePlan, Tier
from flyball.contracts.cluster import Placement, restored_world_size
from flyball.contracts.on_host.engine_wire import Configure

_REMEMBERED_ABANDONED = 16  # as many as a control segment has room for


class HostGeneration:
    """One Configure, seen from this host. It never changes; `ended` is set when a newer generation begins."""

    def __init__(self, configure: Configure, host_id: str) -> None:
        self.configure = configure
        self.host_id = host_id
        self.ended = threading.Event()

    @property
    def placement(self) -> Placement:
        return self.configure.placement

    @property
    def job(self) -> str:
        return self.placement.job

    @property
    def run(self) -> str:
        return self.placement.run

    @property
    def number(self) -> int:
        return self.placement.generation

    @property
    def lineage(self) -> Lineage:
        return self.placement.lineage

    @property
    def restore(self) -> RestorePlan | None:
        return self.placement.restore

    @property
    def restore_step(self) -> int:
        """The step that the generation restores, -1 for none."""
        return self.restore.step if self.restore is not None else -1

    @property
    def restored_world_size(self) -> int:
        """How many ranks saved the step that the generation restores."""
        return restored_world_size(self.placement)

    @property
    def durable_from(self) -> int:
        """The oldest step that this generation can write to a disk tier: its restore step, unless another number of
        ranks saved that, or the first step."""
        is_own = self.restored_world_size == self.placement.world_size
        return max(self.restore_step + (0 if is_own else 1), 0)

    def generation_of(self, step: int) -> int:
        """The generation of the lineage that wrote `step`: the running one, or an ancestor up to the restore step."""
        return next(e.generation for e in self.lineage if e.upto_step is None or step <= e.upto_step)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        return peers.local_ranks(self.placement, self.host_id)

    @cached_property
    def stored_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards in a shared store this host looks after: its own and, on rank 0's host, those of older
        generations that are no more."""
        if not self.coordinates:
            return self.local_ranks
        most = max((entry.world_size for entry in self.lineage), default=0)
        return (*self.local_ranks, *range(self.placement.world_size, most))

    def host_of(self, rank: int) -> str:
        """The host of a rank; '' if this host was not told."""
        return self._hosts.get(rank, "")

    @cached_property
    def _hosts(self) -> dict[int, str]:
        return {rank: host.host_id for host in self.placement.hosts for rank in host.ranks}

    @cached_property
    def replica_hosts(self) -> tuple[str, ...]:
        return peers.replica_hosts(self.placement, self.host_id) if self.configure.spec.replicas > 0 else ()

    @cached_property
    def replicated_ranks(self) -> frozenset[int]:
        return peers.replicated_ranks(self.placement, self.host_id)

    @cached_property
    def coordinator_host(self) -> str:
        return peers.coordinator_host(self.placement)

    @property
    def coordinates(self) -> bool:
        return self.coordinator_host == self.host_id

    @cached_property
    def linked_hosts(self) -> frozenset[str]:
        return peers.linked_hosts(self.placement, self.host_id) if self.local_ranks else frozenset()


class WorldView:
    """The newest world step of one generation, as received by this engine. Thread-safe."""

    def __init__(self, world: WorldStep) -> None:
        self._lock = threading.Lock()
        self._present = world

    @property
    def present(self) -> WorldStep:
        return self._present

    def learn(self, world: WorldStep) -> bool:
        """Merge a message of the coordinator. Returns whether anything changed; nothing ever goes
        back."""
        with self._lock:
            present = self._present
            if world.generation != present.generation:
                return False
            # Messages may arrive in any order. A step stays abandoned until the world step passes it. Without room for
            # all, the newest are kept.
            world_step = max(world.world_step, present.world_step)
            known = {*world.abandoned, *present.abandoned} if world.world_step >= present.world_step else ()
            still_ahead = sorted(step for step in known or present.abandoned if step > world_step)
            upto = max(world.abandoned_upto, present.abandoned_upto)  # it grows with the world step
            abandoned = tuple([step for step in still_ahead if step > upto][-_REMEMBERED_ABANDONED:])
            tiers = _newest(*present.tiers, *world.tiers)
            next_save = max(world.next_save, present.next_save)
            pace = max(world.pace, present.pace)
            is_sure = world.kept_is_sure or present.kept_is_sure
            self._present = WorldStep(
                *(world.job, world.generation, world_step, abandoned, tiers, next_save, upto, pace),
                *(_kept(present, world), is_sure),
            )
            return self._present != present


def _kept(present: WorldStep, world: WorldStep) -> int:
    """The step that stays beside the restored one: the coordinator's word counts, unless it does not know one. Nothing
    stays once a newer step is complete."""
    if world.world_step < present.world_step:
        return present.kept
    return world.kept if world.kept >= 0 or world.world_step > present.world_step else present.kept


def _newest(*namings: TierNaming) -> tuple[TierNaming, ...]:
    """The newest naming per tier. Named steps only grow, and so do the kept steps of one name. A decision about a step
    stays: a restarted coordinator may have forgotten it."""
    newest: dict[Tier, TierNaming] = {}
    for naming in namings:
        known = newest.get(naming.tier)
        if known is None or _age(naming) > _age(known):
            newest[naming.tier] = naming
    return tuple(newest.values())


def _age(naming: TierNaming) -> tuple[int, bool, tuple[int, ...]]:
    return naming.step, naming.together is not StorageDecision.OPEN, naming.kept[-1:]
