"""The recovery point, derived from verified copies: the newest step that every rank can be restored from, and where
each rank gets its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from flyball.contracts.checkpoints import Lineage, RestorePlan, ShardCopy, ShardSource, Tier, is_alive
from flyball.contracts.cluster import HostRanks

_TIER_ORDER = {Tier.MEMORY: 0, Tier.PEER: 1, Tier.DISK: 2, Tier.PERSISTENT: 3}


def newest_step(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> int | None:
    """The newest step of which every rank has a copy, all from one generation and alive by lineage; None if there is
    no such step."""
    point = _newest_point(copies, lineage, world_size)
    return point[0] if point else None


def plan_restore(
    copies: Iterable[ShardCopy],
    lineage: Lineage,
    world_size: int,
    engine_addresses: Mapping[str, str],
    hosts: Sequence[HostRanks],
) -> RestorePlan | None:
    """The recovery point with every rank's sources, best first: memory of the host that will run the rank, a replica
    there, other hosts' memory, then disk, then the persistent tier.

    `engine_addresses` names the hosts that can be asked; a copy elsewhere counts only for ranks that will run beside
    it. None means that there is nothing to restore from.
    """
    home = {rank: host.host_id for host in hosts for rank in host.ranks}
    usable = [copy for copy in copies if _within_reach(copy, home, engine_addresses)]
    point = _newest_point(usable, lineage, world_size)
    if point is None:
        return None
    step, generation = point
    sources: dict[str, list[ShardSource]] = defaultdict(list)
    wanted = {copy for copy in usable if (copy.step, copy.generation) == point and copy.rank < world_size}
    for copy in sorted(wanted, key=lambda c: (c.rank, _preference(c, home), c.host_id)):
        is_local = copy.tier is Tier.PERSISTENT or copy.host_id == home.get(copy.rank)
        source = ShardSource(
            rank=copy.rank,
            generation=generation,
            tier=copy.tier,
            host_id=copy.host_id,
            engine_address="" if is_local else engine_addresses[copy.host_id],
        )
        if source not in sources[str(copy.rank)]:
            sources[str(copy.rank)].append(source)
    return RestorePlan(step=step, sources={rank: tuple(found) for rank, found in sources.items()})


def before(lineage: Lineage, step: int) -> Lineage:
    """The history without `step` and everything after it: for going back to an older recovery point."""
    last = step - 1
    return tuple(
        type(entry)(entry.generation, last if entry.upto_step is None else min(entry.upto_step, last))
        for entry in lineage
    )


def _newest_point(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> tuple[int, int] | None:
    ranks_at: dict[tuple[int, int], set[int]] = defaultdict(set)
    for copy in copies:
        if copy.rank < world_size and is_alive(copy.generation, copy.step, lineage):
            ranks_at[copy.step, copy.generation].add(copy.rank)
    return max((point for point, ranks in ranks_at.items() if len(ranks) == world_size), default=None)


def _within_reach(copy: ShardCopy, home: Mapping[int, str], engine_addresses: Mapping[str, str]) -> bool:
    return (
        copy.tier is Tier.PERSISTENT or copy.host_id == home.get(copy.rank) or bool(engine_addresses.get(copy.host_id))
    )


def _preference(copy: ShardCopy, home: Mapping[int, str]) -> tuple[int, int, int]:
    in_memory = copy.tier in (Tier.MEMORY, Tier.PEER)
    is_local = copy.host_id == home.get(copy.rank)
    return (0 if in_memory else 1 if copy.tier is Tier.DISK else 2, 0 if is_local else 1, _TIER_ORDER[copy.tier])
