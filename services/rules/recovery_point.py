"""Derives the recovery point from verified copies: the newest step that all ranks can restore, and each rank's
sources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.checkpoints import (
    Lineage,
    RestorePlan,
    ShardCopy,
    ShardSource,
    Tier,
    entries_of,
    newest_point,
    world_size_of,
)
from flyball.contracts.cluster import HostRanks
from flyball.contracts.decisions import Harm
from flyball.contracts.recovery import by_nearness, complete_points, is_within_reach


def newest_step(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> int | None:
    """The newest step of the lineage with copies for every rank that saved it, all from one generation; None if there
    is none."""
    point = newest_point(complete_points(copies, lineage, world_size), lineage)
    return point[0] if point else None


def plan_restore(
    copies: Iterable[ShardCopy],
    lineage: Lineage,
    world_size: int,
    engine_addresses: Mapping[str, str],
    hosts: Sequence[HostRanks],
) -> RestorePlan | None:
    """The recovery point with every rank's sources, best first: memory of the host that will run the rank, a replica
    there, other hosts' memory, then disk, then the persistent tier. `world_size` is that of the ranks to start. If
    another number of ranks saved the step (`lineage` says so), the sources are of the shards of those.

    `engine_addresses` names the hosts that can be asked; a copy elsewhere counts only for ranks that will run beside
    it. None means that there is nothing to restore from.
    """
    homes = {rank: host.host_id for host in hosts for rank in host.ranks}
    copies = tuple(copies)
    history = entries_of(lineage, {copy.generation for copy in copies})
    foreign = {generation for generation, (_, e) in history.items() if e.world_size not in (0, world_size)}

    def home_of(copy: ShardCopy) -> str:
        """The host that will run the copy's rank. Of another world's shards any host may need some, so none is home."""
        return "" if copy.generation in foreign else homes.get(copy.rank, "")

    usable = [copy for copy in copies if is_within_reach(copy, home_of(copy), engine_addresses)]
    point = newest_point(complete_points(usable, lineage, world_size), lineage)
    if point is None:
        return None
    step, generation = point
    sources: dict[str, list[ShardSource]] = defaultdict(list)
    ranks = world_size_of(generation, lineage, of_job=world_size)
    wanted = {copy for copy in usable if (copy.step, copy.generation) == point and copy.rank < ranks}
    for copy in sorted(wanted, key=lambda copy: by_nearness(copy, home_of(copy))):
        is_local = copy.tier is Tier.PERSISTENT or copy.host_id == home_of(copy)
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


def before_harm(lineage: Lineage, harm: Harm) -> Lineage:
    """The history without the steps that a harm makes suspect or bad."""
    return before(lineage, harm.clean_step + 1)


def before(lineage: Lineage, step: int) -> Lineage:
    """The history before `step`, for a restore of an older recovery point."""
    last = step - 1
    return tuple(
        msgspec.structs.replace(entry, upto_step=last if entry.upto_step is None else min(entry.upto_step, last))
        for entry in lineage
    )
