"""Chooses and orders the verified copies that can serve a restore: one rule for the controller, the engine and the
command line. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, entries_of
from flyball.contracts.identity import HostId, Rank, Step


class Origin(IntEnum):
    """Where a rank's bytes come from, seen from the host that needs them; nearest first."""

    LOCAL_SLOT = 0
    LOCAL_REPLICA = 1  # in this host's memory, stored for another host
    REMOTE_MEMORY = 2
    LOCAL_DISK = 3
    REMOTE_DISK = 4
    PERSISTENT = 5

    @property
    def tier(self) -> Tier:
        """The tier that a restore from here reports: memory other than the rank's own slot counts as a peer's."""
        match self:
            case Origin.LOCAL_SLOT:
                return Tier.MEMORY
            case Origin.LOCAL_REPLICA | Origin.REMOTE_MEMORY:
                return Tier.PEER
            case Origin.LOCAL_DISK | Origin.REMOTE_DISK:
                return Tier.DISK
            case Origin.PERSISTENT:
                return Tier.PERSISTENT


class NotUsable(StrEnum):
    """Why a copy cannot serve a restore, or why a rank has none."""

    NO_COPY = "no_copy"  # no host lists one
    LOST_HOST = "lost_host"
    UNREACHABLE = "unreachable"  # on a host whose engine does not answer
    DEAD_LINEAGE = "dead_lineage"  # a later generation branched off before it, or its history does not count
    OTHER_GENERATION = "other_generation"  # complete only in another generation; they are never mixed
    OTHER_WORLD_SIZE = "other_world_size"  # than the history says
    NOT_SEALED = "not_sealed"  # in the persistent tier, without its world manifest


def origin_of(tier: Tier, host_id: HostId, home: HostId) -> Origin:
    """Where a copy in `tier` of `host_id` lies, seen from `home`, the host that runs the rank ('' if none does)."""
    if tier is Tier.PERSISTENT:
        return Origin.PERSISTENT
    is_local = bool(home) and host_id == home
    if tier is Tier.DISK:
        return Origin.LOCAL_DISK if is_local else Origin.REMOTE_DISK
    if not is_local:
        return Origin.REMOTE_MEMORY
    return Origin.LOCAL_SLOT if tier is Tier.MEMORY else Origin.LOCAL_REPLICA


def is_within_reach(copy: ShardCopy, home: HostId, engine_addresses: Mapping[HostId, str]) -> bool:
    """Whether `home` can get the copy: it is local, in the store, or on a host whose engine answers."""
    return copy.tier is Tier.PERSISTENT or copy.host_id == home or bool(engine_addresses.get(copy.host_id))


def by_nearness(copy: ShardCopy, home: HostId) -> tuple[Rank, Origin, bool, HostId]:
    """Sort key for the copies of one step: by rank, then nearest first. In remote memory the rank's old slot precedes
    replicas."""
    return copy.rank, origin_of(copy.tier, copy.host_id, home), copy.tier is Tier.PEER, copy.host_id


def complete_points(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> set[tuple[Step, int]]:
    """Every (step, generation) that is alive by lineage and of which there is a copy for every rank that saved it.
    `world_size` is the job's."""
    ranks_at: dict[tuple[Step, int], set[Rank]] = defaultdict(set)
    for copy in copies:
        ranks_at[copy.step, copy.generation].add(copy.rank)
    history = entries_of(lineage, {generation for _, generation in ranks_at})
    found = set()
    for (step, generation), ranks in ranks_at.items():
        if generation not in history:
            continue
        _, entry = history[generation]
        saved_by = entry.world_size or world_size
        is_complete = sum(rank < saved_by for rank in ranks) == saved_by
        if is_complete and (entry.upto_step is None or step <= entry.upto_step):
            found.add((step, generation))
    return found
