"""Predicts the restore of a step: per rank the sources, nearest first, with their expected seconds; and the reason for
every unusable copy and every rank without one. Pure.

The copies come from inventories, of engines or of folders and stores read offline. `flyball.contracts.recovery` decides
which of them count and in which order, as it does for the controller's choice of the recovery point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ckpt_engine.format.manifest import Manifest
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive, world_size_of
from flyball.contracts.identity import HostId, Rank, Step
from flyball.contracts.recovery import NotUsable, Origin, by_nearness, is_within_reach, origin_of


class Bandwidths(msgspec.Struct, frozen=True):
    """Bytes per second at which one host gets verified shards from each origin. The defaults are assumptions: memory at
    4 GB/s, a network of 10 Gbit/s, a disk at 1 GB/s, a store at 200 MB/s. Replace them by measured values."""

    local_memory: float = 4e9
    remote_memory: float = 1.25e9
    local_disk: float = 1e9
    remote_disk: float = 1e9
    persistent: float = 2e8

    def of(self, origin: Origin) -> float:
        match origin:
            case Origin.LOCAL_SLOT | Origin.LOCAL_REPLICA:
                return self.local_memory
            case Origin.REMOTE_MEMORY:
                return self.remote_memory
            case Origin.LOCAL_DISK:
                return self.local_disk
            case Origin.REMOTE_DISK:
                return self.remote_disk
            case Origin.PERSISTENT:
                return self.persistent


class WantedWorld(msgspec.Struct, frozen=True):
    """The world to restore. A rank without a host in `home` will run elsewhere, so all copies are remote to it."""

    world_size: int
    home: Mapping[Rank, HostId]


class PlannedSource(msgspec.Struct, frozen=True):
    """One source to try. `seconds` is for this shard alone."""

    origin: Origin
    copy: ShardCopy
    seconds: float


class UnusableCopy(msgspec.Struct, frozen=True):
    copy: ShardCopy
    reason: NotUsable


class ShardPlan(msgspec.Struct, frozen=True):
    """One rank's plan. `reason` is None exactly if there is a source."""

    rank: Rank
    home: HostId  # '' if no host is known to run it
    sources: tuple[PlannedSource, ...]  # in the order of the attempts
    unusable: tuple[UnusableCopy, ...]
    reason: NotUsable | None


class StepPlan(msgspec.Struct, frozen=True):
    """The plan for the whole world. `generation` wrote the copies; -1 if there are none."""

    step: Step
    generation: int
    shards: tuple[ShardPlan, ...]  # by rank
    seconds: float  # until the last host is done, if first sources succeed; 0.0 unless `is_restorable`

    @property
    def is_restorable(self) -> bool:
        return all(shard.sources for shard in self.shards)


def plan_step(
    step: Step,
    copies: Iterable[ShardCopy],
    layout: WantedWorld,
    *,
    lineage: Lineage | None = None,
    lost_hosts: Collection[HostId] = (),
    engine_addresses: Mapping[HostId, str] | None = None,
    sealed: Collection[tuple[int, Step]] | None = None,
    manifests: Mapping[str, Manifest] | None = None,
    bandwidths: Bandwidths | None = None,
) -> StepPlan:
    """Plan the restore of `step` for the wanted `layout`. If another number of ranks saved it (`lineage` says so), the
    plan is for the shards of those, of which any host may need parts.

    `lineage` None: all generations count, and the newest complete one is taken. `engine_addresses` None: every host
    that is not lost can be reached. `sealed`: the (generation, step) with a world manifest; None: the inventory lists
    no others. `manifests`, by the digest in a copy, must say the same world size. Ranks whose home is lost are planned
    as if they ran on a host without copies.
    """

    def saved_by(generation: int) -> int:
        return world_size_of(generation, lineage or (), of_job=layout.world_size)

    def home_of(generation: int, rank: Rank) -> HostId:
        """The host that restores the shard; '' if any may need it, or none is known."""
        host = layout.home.get(rank, "") if saved_by(generation) == layout.world_size else ""
        return "" if host in lost_hosts else host

    at_step = sorted({copy for copy in copies if copy.step == step and copy.rank < saved_by(copy.generation)})

    def reason(copy: ShardCopy) -> NotUsable | None:
        if lineage is not None and not is_alive(copy.generation, step, lineage):
            return NotUsable.DEAD_LINEAGE
        if copy.tier is Tier.PERSISTENT and sealed is not None and (copy.generation, step) not in sealed:
            return NotUsable.NOT_SEALED
        if copy.tier is not Tier.PERSISTENT and copy.host_id in lost_hosts:
            return NotUsable.LOST_HOST
        home = home_of(copy.generation, copy.rank)
        if engine_addresses is not None and not is_within_reach(copy, home, engine_addresses):
            return NotUsable.UNREACHABLE
        manifest = (manifests or {}).get(copy.digest)
        if manifest is not None and manifest.world_size != saved_by(copy.generation):
            return NotUsable.OTHER_WORLD_SIZE
        return None

    judged = {copy: reason(copy) for copy in at_step}
    generation = _generation([copy for copy, why in judged.items() if why is None] or at_step)
    by_rank: dict[Rank, list[UnusableCopy]] = defaultdict(list)
    usable: dict[Rank, list[ShardCopy]] = defaultdict(list)
    for copy, why in judged.items():
        if why is None and copy.generation == generation:
            usable[copy.rank].append(copy)
        else:
            by_rank[copy.rank].append(UnusableCopy(copy, why or NotUsable.OTHER_GENERATION))
    shards = tuple(
        _shard_plan(rank, home_of(generation, rank), usable[rank], by_rank[rank], bandwidths or Bandwidths())
        for rank in range(saved_by(generation))
    )
    return StepPlan(step, generation, shards, _seconds(shards))


def _shard_plan(
    rank: Rank, home: HostId, usable: list[ShardCopy], unusable: list[UnusableCopy], bandwidths: Bandwidths
) -> ShardPlan:
    sources = []
    for copy in sorted(usable, key=lambda copy: by_nearness(copy, home)):
        origin = origin_of(copy.tier, copy.host_id, home)
        sources.append(PlannedSource(origin, copy, copy.size_bytes / bandwidths.of(origin)))
    reason = None if sources else _main_reason(unusable)
    return ShardPlan(rank, home, tuple(sources), tuple(unusable), reason)


def _generation(copies: Iterable[ShardCopy]) -> int:
    """The generation with copies of the most ranks, the newest of several; -1 for none."""
    ranks: dict[int, set[Rank]] = defaultdict(set)
    for copy in copies:
        ranks[copy.generation].add(copy.rank)
    return max(ranks, key=lambda generation: (len(ranks[generation]), generation), default=-1)


def _main_reason(unusable: list[UnusableCopy]) -> NotUsable:
    """Why a rank has no source: the reason of the copy that an operator could most easily make usable."""
    order = (
        NotUsable.UNREACHABLE,
        NotUsable.LOST_HOST,
        NotUsable.NOT_SEALED,
        NotUsable.OTHER_GENERATION,
        NotUsable.OTHER_WORLD_SIZE,
        NotUsable.DEAD_LINEAGE,
    )
    reasons = {entry.reason for entry in unusable}
    return next((reason for reason in order if reason in reasons), NotUsable.NO_COPY)


def _seconds(shards: tuple[ShardPlan, ...]) -> float:
    """The ranks of one host share their disk and network, and so do all that one host serves. The busiest of these
    decides."""
    if not all(shard.sources for shard in shards):
        return 0.0
    busy: dict[tuple[str, HostId | Rank, str], float] = defaultdict(float)
    for shard in shards:
        first = shard.sources[0]
        is_remote = first.origin in (Origin.REMOTE_MEMORY, Origin.REMOTE_DISK)
        path = "network" if is_remote else first.origin.name
        busy["into", shard.home or shard.rank, path] += first.seconds
        if is_remote:
            busy["out of", first.copy.host_id, path] += first.seconds
    return max(busy.values(), default=0.0)
