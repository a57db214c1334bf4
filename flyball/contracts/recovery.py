"""Which verified copies can serve a restore, and in which order: one rule for the controller, the engine and the
command line. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive
from flyball.contracts.identity import HostId, Rank, Step


class Origin(IntEnum):
    """Where a rank's bytes come from as seen by the host that needs them, nearest first."""

    LOCAL_SLOT = 0
    LOCAL_REPLICA = 1  # in this host's memory, kept for another host
    REMOTE_MEMORY = 2
    LOCAL_DISK = 3
    REMOTE_DISK = 4
    PERSISTENT = 5

    @property
    def tier(self) -> Tier:
        """The tier under which a restore from here is reported: any host's memory but the rank's own is a peer's."""
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
    """Why a copy cannot serve a restore, or a rank has no copy."""

    NO_COPY = "no_copy"  # nobody lists one
    LOST_HOST = "lost_host"
    UNREACHABLE = "unreachable"  # on a host whose engine nobody can ask
    DEAD_LINEAGE = "dead_lineage"  # a later generation branched off before it, or its history does not count
    OTHER_GENERATION = "other_generation"  # the step is complete in another generation, and steps are never mixed
    OTHER_WORLD_SIZE = "other_world_size"
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
    """Whether `home` can get at the copy: its own, one in the store, or one of a host whose engine can be asked."""
    return copy.tier is Tier.PERSISTENT or copy.host_id == home or bool(engine_addresses.get(copy.host_id))


def by_nearness(copy: ShardCopy, home: HostId) -> tuple[Rank, Origin, bool, HostId]:
    """Sorts the copies of one step: by rank, nearest first. Of remote memory the rank's old slot comes before a
    replica."""
    return copy.rank, origin_of(copy.tier, copy.host_id, home), copy.tier is Tier.PEER, copy.host_id


def complete_points(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> set[tuple[Step, int]]:
    """(step, generation) of which every rank has a copy, all from one generation and alive by lineage."""
    ranks_at: dict[tuple[Step, int], set[Rank]] = defaultdict(set)
    for copy in copies:
        if copy.rank < world_size:
            ranks_at[copy.step, copy.generation].add(copy.rank)
    return {
        (step, generation)
        for (step, generation), ranks in ranks_at.items()
        if len(ranks) == world_size and is_alive(generation, step, lineage)
    }
