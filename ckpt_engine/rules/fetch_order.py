"""The order in which an engine tries the sources of a restore. Pure.

The controller's plan lists who has the bytes. The nearest come first: a replica in this host's memory, another host's
memory, this host's disk, another host's disk, the persistent store. Among equals the plan's order holds. The rank's own
slot is not in the list: then nothing has to be fetched.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardSource
from flyball.contracts.recovery import Origin, origin_of

_REMOTE = (Origin.REMOTE_MEMORY, Origin.REMOTE_DISK)


class FetchStep(msgspec.Struct, frozen=True):
    """One source to try."""

    origin: Origin
    source: ShardSource


def fetch_order(plan: RestorePlan, rank: int, *, host_id: str) -> tuple[FetchStep, ...]:
    """The sources to try for `rank` on `host_id`, in order; () if the plan has none within reach."""
    steps = [
        FetchStep(origin, source)
        for source in plan.sources.get(str(rank), ())
        if (origin := _origin(source, host_id)) is not None
    ]
    return tuple(sorted(steps, key=lambda step: step.origin))  # stable: the controller's order within a class


def source_generation(plan: RestorePlan, rank: int) -> int | None:
    """The generation that wrote the rank's restore step; None if the plan has no source for the rank."""
    sources = plan.sources.get(str(rank), ())
    return sources[0].generation if sources else None


def _origin(source: ShardSource, host_id: str) -> Origin | None:
    origin = origin_of(source.tier, source.host_id, host_id)
    if origin is Origin.LOCAL_SLOT or (origin in _REMOTE and not source.engine_address):
        return None  # nothing to fetch, or its host has no engine to ask
    return origin
