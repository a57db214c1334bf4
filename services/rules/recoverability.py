"""What a job would lose if a host, a failure domain or everything were lost now, from its verified copies. Pure.

A loss takes all copies in the memory and on the disks of its hosts; the persistent tier outlives them. What is left is
searched for the newest recovery point, as for a restart. A recovery point goes with a host, or with a failure domain,
that has all copies of one of its ranks.

Only recovery points that may be the newest one left are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.checkpoints import Lineage, Point, Tier, world_size_of
from flyball.contracts.recovery import Origin, origin_of
from services.rules.holdings import Holding, RankSet, complete_points, rank_set


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


class _PointHoldings(msgspec.Struct, frozen=True):
    """A recovery point, with what is held of it."""

    point: Point
    ranks: RankSet  # that saved it
    holdings: Sequence[Holding]
    has_persistent: bool


def worst_cases(
    holdings: Sequence[Holding],
    lineage: Lineage,
    world_size: int,
    homes: Mapping[str, Collection[int]],
    domains: Mapping[str, str],
) -> tuple[WorstCase, ...]:
    """The worst case of each loss. `holdings`: those within reach. `homes`: host -> its ranks. `domains`: host ->
    failure domain; a host without one is a domain of its own. Empty for a job without ranks."""
    if not homes:
        return ()
    points = _newest_first(holdings, lineage, world_size)
    hosts = {holding.host_id for holding in holdings} | homes.keys()
    units: dict[Lost, Mapping[str, str]] = {
        Lost.HOST: {host: host for host in hosts},
        Lost.FAILURE_DOMAIN: {host: domains.get(host) or host for host in hosts},
        Lost.EVERYTHING: dict.fromkeys(hosts, ""),
    }

    def case(lost: Lost, newest: Mapping[str, int], name: str, lost_hosts: Collection[str]) -> WorstCase:
        left = points[newest[name]] if newest[name] < len(points) else None
        return WorstCase(
            lost=lost,
            name=name,
            cases=len(newest),
            costly_cases=sum(1 for place in newest.values() if place > 0),
            recovery_step=left.point[0] if left else -1,
            tier=_slowest_tier(left, _homes_at(left.point, lineage, world_size, homes), lost_hosts) if left else None,
        )

    found = [case(Lost.PROCESSES, {"": 0}, "", ())]
    for lost, unit_of in units.items():
        newest = _newest_left(points, unit_of, {unit_of[host] for host in homes})
        name = max(sorted(newest), key=lambda unit: newest[unit])
        found.append(case(lost, newest, name, {host for host, unit in unit_of.items() if unit == name}))
    return tuple(found)


def _newest_first(holdings: Iterable[Holding], lineage: Lineage, world_size: int) -> list[_PointHoldings]:
    """The recovery points of the history, the newest first."""
    groups: defaultdict[Point, list[Holding]] = defaultdict(list)
    for holding in holdings:
        groups[holding.point].append(holding)
    return [
        _PointHoldings(point, ranks, groups[point], any(one.tier is Tier.PERSISTENT for one in groups[point]))
        for point, ranks in complete_points(holdings, lineage, world_size).items()
    ]


def _newest_left(points: Sequence[_PointHoldings], unit_of: Mapping[str, str], units: set[str]) -> dict[str, int]:
    """Each unit -> the place in `points` of the newest one that outlives its loss; their number if none does."""
    found: dict[str, int] = {}
    undecided, is_one_unit = set(units), len(set(unit_of.values())) == 1
    for place, point in enumerate(points):
        if not undecided:
            break
        if is_one_unit and not point.has_persistent:
            continue
        needed = _needed_units(point, unit_of)
        found.update(dict.fromkeys(undecided - needed, place))
        undecided &= needed
    return found | dict.fromkeys(undecided, len(points))


def _needed_units(point: _PointHoldings, unit_of: Mapping[str, str]) -> set[str]:
    """The units each of which has all copies of some rank."""
    persistent: RankSet = 0
    in_unit: defaultdict[str, RankSet] = defaultdict(int)
    for holding in point.holdings:
        if holding.tier is Tier.PERSISTENT:
            persistent |= holding.ranks
        else:
            in_unit[unit_of[holding.host_id]] |= holding.ranks
    in_one: RankSet = 0  # or more
    in_more = persistent
    for ranks in in_unit.values():
        in_more |= in_one & ranks
        in_one |= ranks
    only = point.ranks & in_one & ~in_more
    return {unit for unit, ranks in in_unit.items() if ranks & only}


_AT_HOME: Mapping[Tier, Origin] = {tier: origin_of(tier, "host", "host") for tier in Tier}
_ELSEWHERE: Mapping[Tier, Origin] = {tier: origin_of(tier, "host", "") for tier in Tier}


def _homes_at(
    point: Point, lineage: Lineage, world_size: int, homes: Mapping[str, Collection[int]]
) -> Mapping[str, Collection[int]]:
    """Host -> its ranks, if as many ranks saved this point: else any host may need any shard."""
    return homes if world_size_of(point[1], lineage, of_job=world_size) == world_size else {}


def _slowest_tier(left: _PointHoldings, homes: Mapping[str, Collection[int]], lost_hosts: Collection[str]) -> Tier:
    """The slowest tier that a rank would read from, if each takes its nearest copy. A rank whose host is lost starts
    elsewhere."""
    from_origin: defaultdict[Origin, RankSet] = defaultdict(int)
    for holding in left.holdings:
        if holding.host_id in lost_hosts and holding.tier is not Tier.PERSISTENT:
            continue
        at_home = holding.ranks & rank_set(tuple(homes.get(holding.host_id, ())))
        from_origin[_AT_HOME[holding.tier]] |= at_home
        from_origin[_ELSEWHERE[holding.tier]] |= holding.ranks ^ at_home
    missing, slowest = left.ranks, Origin.LOCAL_SLOT
    for origin in Origin:
        if missing & from_origin[origin]:
            slowest = origin
            missing &= ~from_origin[origin]
    return slowest.tier
