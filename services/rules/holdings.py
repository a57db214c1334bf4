"""Verified copies as sets of ranks: which ranks' shards of a step lie where. Pure.

A job of thousands of hosts has a hundred thousand copies. A set of ranks is one whole number, with a bit for each rank,
so that questions about all copies take operations of whole sets instead of loops over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from flyball.contracts.checkpoints import Lineage, Point, Tier, entries_of

RankSet = int  # bit r: rank r


class CopyFacts(msgspec.Struct, frozen=True, gc=False):
    """What is needed here of a ShardCopy; decoding takes a quarter of the time."""

    job: str
    generation: int
    step: int
    rank: int
    tier: Tier
    size_bytes: int


class Holding(msgspec.Struct, frozen=True, gc=False):
    """The copies of a point in one tier of one host ('' for the persistent tier)."""

    host_id: str
    tier: Tier
    point: Point
    ranks: RankSet
    copies: int
    size_bytes: int


def held(host_id: str, job: str, copies: Iterable[CopyFacts]) -> list[Holding]:
    """Return the holdings of a host, of its copies for one job."""
    groups: defaultdict[tuple[Tier, Point], list[CopyFacts]] = defaultdict(list)
    for copy in copies:
        if copy.job == job:
            groups[copy.tier, (copy.step, copy.generation)].append(copy)
    return [
        Holding(
            host_id=host_id,
            tier=tier,
            point=point,
            ranks=rank_set(tuple([copy.rank for copy in group])),
            copies=len(group),
            size_bytes=sum([copy.size_bytes for copy in group]),
        )
        for (tier, point), group in groups.items()
    ]


@lru_cache(maxsize=1 << 14)  # a host has the same ranks at each step
def rank_set(ranks: tuple[int, ...]) -> RankSet:
    lowest = min(ranks, default=0)  # the ranks of a host are close together, and small numbers are quick
    bits = 0
    for rank in ranks:
        bits |= 1 << (rank - lowest)
    return bits << lowest


def by_newest_word(holdings: Sequence[Holding], lineage: Lineage, world_size: int) -> list[Holding]:
    """Return the holdings of one tier as they were when the host that spoke first spoke.

    Hosts report at different moments, so that in a memory that holds two steps no step may seem complete. But an engine
    drops a step only for a newer one that every rank has: who holds a newer one now held this one as well.
    """
    history = entries_of(lineage, {generation for _, generation in (one.point for one in holdings)})
    alive: defaultdict[tuple[int, int], list[Holding]] = defaultdict(list)  # place in the history, step
    for one in holdings:
        step, generation = one.point
        place, entry = history.get(generation, (-1, None))
        if entry is not None and (entry.upto_step is None or step <= entry.upto_step):
            alive[place, step].append(one)
    reached: RankSet = 0
    newer: dict[str, Holding] = {}  # host -> one that is newer than those looked at
    size = 0
    for key in sorted(alive, reverse=True):
        point = alive[key][0].point
        saved_by = history[point[1]][1].world_size or world_size
        if saved_by != (size or saved_by):
            break  # shards of other sizes have nothing in common
        size = saved_by
        for one in alive[key]:
            reached |= one.ranks
        if reached & (1 << size) - 1 == (1 << size) - 1:
            here = {one.host_id for one in alive[key]}
            before = (msgspec.structs.replace(one, point=point, copies=0, size_bytes=0) for one in newer.values())
            return [*holdings, *(one for one in before if one.host_id not in here)]
        newer |= {one.host_id: one for one in alive[key]}
    return list(holdings)


def complete_points(holdings: Iterable[Holding], lineage: Lineage, world_size: int) -> dict[Point, RankSet]:
    """Return the points that are alive by lineage and of which these have a copy for every rank that saved them, the
    newest first, each with the set of those ranks. `world_size` is the job's."""
    found: defaultdict[Point, RankSet] = defaultdict(int)
    for holding in holdings:
        found[holding.point] |= holding.ranks
    history = entries_of(lineage, {generation for _, generation in found})
    complete: dict[Point, RankSet] = {}
    for (step, generation), ranks in found.items():
        if generation in history:
            _, entry = history[generation]
            saved_by = (1 << (entry.world_size or world_size)) - 1
            if ranks & saved_by == saved_by and (entry.upto_step is None or step <= entry.upto_step):
                complete[step, generation] = saved_by
    newest_first = sorted(complete, key=lambda point: (history[point[1]][0], point[0]), reverse=True)
    return {point: complete[point] for point in newest_first}
