"""The order in which an engine tries the sources of a restore. Pure.

The controller's plan lists who has the bytes. The nearest come first: a replica in this host's memory, another host's
memory, this host's disk, another host's disk, the persistent store. Among equals the plan's order holds. The rank's own
slot is not in the list: then nothing has to be fetched.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import Placement, restores_another_world
from flyball.contracts.recovery import Origin, origin_of

_REMOTE = (Origin.REMOTE_MEMORY, Origin.REMOTE_DISK)
_READ_HERE = {Origin.LOCAL_DISK: Origin.LOCAL_REPLICA}  # as near as that, if nothing has to be copied


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


def gather_order(
    plan: RestorePlan, rank: int, *, placement: Placement, host_id: str, in_memory: Collection[Tier]
) -> tuple[FetchStep, ...]:
    """The sources to try for the shard that `rank` saved, on a host that reads parts of it. `in_memory`: the tiers of
    this host's memory that have it, whether the plan knows or not.

    What this host's processes can read themselves comes first, its disk too: nothing has to be copied, and no memory is
    taken. A plan for ranks that restore their own shards does not say how to reach those of other hosts: then all hosts
    that the placement names are asked, that of the rank first, and the store.
    """
    generation = plan.source_generation
    here = [ShardSource(rank, generation, tier, host_id, "") for tier in (Tier.MEMORY, Tier.PEER) if tier in in_memory]
    steps = [FetchStep(origin_of(source.tier, host_id, host_id), source) for source in here]
    steps += [step for step in fetch_order(plan, rank, host_id=host_id) if step.origin is not Origin.LOCAL_REPLICA]
    if not restores_another_world(placement):
        hosts = [host for host in placement.hosts if host.host_id != host_id and host.engine_address]
        asked = [
            ShardSource(rank, generation, Tier.MEMORY, host.host_id, host.engine_address)
            for host in sorted(hosts, key=lambda host: rank not in host.ranks)
        ]
        steps += [FetchStep(Origin.REMOTE_MEMORY, source) for source in asked]
        steps.append(FetchStep(Origin.LOCAL_DISK, ShardSource(rank, generation, Tier.DISK, host_id, "")))
        steps.append(FetchStep(Origin.PERSISTENT, ShardSource(rank, generation, Tier.PERSISTENT, "", "")))
    return tuple(sorted(dict.fromkeys(steps), key=lambda step: _READ_HERE.get(step.origin, step.origin)))


def source_generation(plan: RestorePlan, rank: int) -> int | None:
    """The generation that wrote the rank's restore step; None if the plan has no source for the rank."""
    sources = plan.sources.get(str(rank), ())
    return sources[0].generation if sources else None


def _origin(source: ShardSource, host_id: str) -> Origin | None:
    origin = origin_of(source.tier, source.host_id, host_id)
    if origin is Origin.LOCAL_SLOT or (origin in _REMOTE and not source.engine_address):
        return None  # nothing to fetch, or its host has no engine to ask
    return origin
