"""In which order an engine tries to get a rank's bytes of the restore step. Pure.

The controller says who has them (RestorePlan); what is near comes first: a replica in this host's own memory, another
host's memory, this host's disk, another host's disk, the persistent store. Within one class the controller's order
holds. A slot of the rank in local memory is no entry here: nothing needs to be fetched then.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier


class Origin(IntEnum):
    """Where the bytes come from as seen by the host that needs them, nearest first."""

    LOCAL_REPLICA = 0
    REMOTE_MEMORY = 1
    LOCAL_DISK = 2
    REMOTE_DISK = 3
    PERSISTENT = 4

    @property
    def tier(self) -> Tier:
        """The tier under which a restore from here is reported: any host's memory but the rank's own is a peer's."""
        if self in (Origin.LOCAL_REPLICA, Origin.REMOTE_MEMORY):
            return Tier.PEER
        return Tier.PERSISTENT if self is Origin.PERSISTENT else Tier.DISK


class FetchStep(msgspec.Struct, frozen=True):
    """One thing to try."""

    origin: Origin
    source: ShardSource


def fetch_order(plan: RestorePlan, rank: int, *, host_id: str) -> tuple[FetchStep, ...]:
    """What to try for `rank` on `host_id`, in order; () if the plan names no source that could be asked."""
    steps = [
        FetchStep(origin, source)
        for source in plan.sources.get(str(rank), ())
        if (origin := _origin(source, host_id)) is not None
    ]
    return tuple(sorted(steps, key=lambda step: step.origin))  # stable: the controller's order within a class


def source_generation(plan: RestorePlan, rank: int) -> int | None:
    """The generation that wrote the rank's bytes of the restore step; None if the plan has no source for it."""
    sources = plan.sources.get(str(rank), ())
    return sources[0].generation if sources else None


def _origin(source: ShardSource, host_id: str) -> Origin | None:
    if source.tier is Tier.PERSISTENT:
        return Origin.PERSISTENT
    if source.host_id == host_id:
        return {Tier.PEER: Origin.LOCAL_REPLICA, Tier.DISK: Origin.LOCAL_DISK}.get(source.tier)
    if not source.engine_address:
        return None  # on a host that nobody can ask
    return Origin.REMOTE_DISK if source.tier is Tier.DISK else Origin.REMOTE_MEMORY
