"""In which order an engine tries to get a rank's bytes of the restore step. Pure.

The controller says who has them (RestorePlan); what is near comes first: a replica in this host's own memory, another
host's memory, this host's disk, another host's disk, the persistent store. Within one class the controller's order
holds. A slot of the rank in local memory is no entry here: nothing needs to be fetched then.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardSource
from flyball.contracts.recovery import Origin, origin_of

_REMOTE = (Origin.REMOTE_MEMORY, Origin.REMOTE_DISK)


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
    origin = origin_of(source.tier, source.host_id, host_id)
    if origin is Origin.LOCAL_SLOT or (origin in _REMOTE and not source.engine_address):
        return None  # nothing to fetch, or on a host that nobody can ask
    return origin
