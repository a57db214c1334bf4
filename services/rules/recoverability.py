"""What a job would lose if a host, a failure domain or everything were lost now, from its verified copies. Pure.

A loss takes all copies in the memory and on the disks of its hosts; the persistent tier outlives them. What is left is
searched for the newest recovery point, as for a restart. A recovery point goes with a host, or with a failure domain,
that has all copies of one of its ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.checkpoints import Lineage, Point, ShardCopy, Tier, world_size_of
from flyball.contracts.recovery import Origin, by_nearness, complete_points, origin_of

_Holders = Mapping[
    Point, Mapping[int, frozenset[str]]
]  # point -> rank -> hosts with a copy, '' for the persistent tier


class Lost(StrEnum):
    """What is lost, from no more than the ranks' processes to all hosts."""

    PROCESSES = "processes"
    HOST = "host"
    FAILURE_DOMAIN = "failure_domain"
    EVERYTHING = "everything"


class WorstCase(msgspec.Struct, frozen=True):
    """The worst case of a loss."""

    lost: Lost
    name: str  # the host or failure domain whose loss costs most, of several the first; '' if it has no name
    cases: int  # hosts or failure domains with ranks
    costly_cases: int  # those whose loss costs steps that the loss of the processes alone would not
    recovery_step: int  # -1: from scratch
    tier: Tier | None  # the slowest that a rank would read from; None: from scratch


def worst_cases(
    copies: Sequence[ShardCopy], lineage: Lineage, world_size: int, homes: Mapping[int, str], domains: Mapping[str, str]
) -> tuple[WorstCase, ...]:
    """The worst case of each loss. `copies`: those within reach. `homes`: rank -> its host. `domains`: host -> failure
    domain; a host without one is a domain of its own. Empty for a job without ranks."""
    if not homes:
        return ()
    place = {entry.generation: number for number, entry in enumerate(lineage)}
    known = complete_points(copies, lineage, world_size)
    points = sorted(known, key=lambda point: (place[point[1]], point[0]), reverse=True)
    holders = _holders(copies, points, lineage, world_size)
    units: dict[Lost, Callable[[str], str]] = {
        Lost.HOST: lambda host: host,
        Lost.FAILURE_DOMAIN: lambda host: domains.get(host) or host,
        Lost.EVERYTHING: lambda _: "",
    }
    found = [_case(Lost.PROCESSES, "", {"": 0}, points, _Left(copies, lineage, world_size, homes, lambda _: False))]
    for lost, unit_of in units.items():
        newest = _newest_left(points, holders, unit_of, {unit_of(host) for host in homes.values()})
        name = max(sorted(newest), key=lambda unit: newest[unit])
        is_lost = _is_in(unit_of, name)
        found.append(_case(lost, name, newest, points, _Left(copies, lineage, world_size, homes, is_lost)))
    return tuple(found)


class _Left(msgspec.Struct, frozen=True):
    """The copies, and which hosts are lost."""

    copies: Sequence[ShardCopy]
    lineage: Lineage
    world_size: int
    homes: Mapping[int, str]
    is_lost: Callable[[str], bool]

    def slowest_tier(self, point: Point) -> Tier:
        """The slowest tier that a rank would read from, if each takes its nearest copy. A rank whose host is lost
        starts elsewhere."""
        nearest: dict[int, tuple[tuple[int, Origin, bool, str], Origin]] = {}
        has_homes = world_size_of(point[1], self.lineage, of_job=self.world_size) == self.world_size
        for copy in self.copies:
            if (copy.step, copy.generation) != point:
                continue
            if copy.tier is not Tier.PERSISTENT and self.is_lost(copy.host_id):
                continue
            home = self.homes.get(copy.rank, "") if has_homes else ""
            home = "" if self.is_lost(home) else home
            key = by_nearness(copy, home)
            if copy.rank not in nearest or key < nearest[copy.rank][0]:
                nearest[copy.rank] = key, origin_of(copy.tier, copy.host_id, home)
        return max(origin for _, origin in nearest.values()).tier


def _case(lost: Lost, name: str, newest: Mapping[str, int], points: Sequence[Point], left: _Left) -> WorstCase:
    point = points[newest[name]] if newest[name] < len(points) else None
    return WorstCase(
        lost=lost,
        name=name,
        cases=len(newest),
        costly_cases=sum(1 for place in newest.values() if place > 0),
        recovery_step=point[0] if point else -1,
        tier=left.slowest_tier(point) if point else None,
    )


def _holders(copies: Iterable[ShardCopy], points: Collection[Point], lineage: Lineage, world_size: int) -> _Holders:
    sizes = {point: world_size_of(point[1], lineage, of_job=world_size) for point in points}
    found: dict[Point, defaultdict[int, set[str]]] = {point: defaultdict(set) for point in points}
    for copy in copies:
        point = (copy.step, copy.generation)
        if copy.rank < sizes.get(point, 0):
            found[point][copy.rank].add("" if copy.tier is Tier.PERSISTENT else copy.host_id)
    return {point: {rank: frozenset(hosts) for rank, hosts in ranks.items()} for point, ranks in found.items()}


def _newest_left(
    points: Sequence[Point], holders: _Holders, unit_of: Callable[[str], str], units: set[str]
) -> dict[str, int]:
    """Each unit -> the place in `points` of the newest one that outlives its loss; their number if none does."""
    found: dict[str, int] = {}
    undecided = set(units)
    for place, point in enumerate(points):
        needed = {_only_unit(hosts, unit_of) for hosts in set(holders[point].values())}
        found.update(dict.fromkeys(undecided - needed, place))
        undecided &= needed
    return found | dict.fromkeys(undecided, len(points))


def _only_unit(hosts: frozenset[str], unit_of: Callable[[str], str]) -> str | None:
    """The unit that has all copies of a rank, None if there is no such unit."""
    units = {unit_of(host) for host in hosts}
    return units.pop() if len(units) == 1 and "" not in hosts else None


def _is_in(unit_of: Callable[[str], str], unit: str) -> Callable[[str], bool]:
    return lambda host: unit_of(host) == unit
