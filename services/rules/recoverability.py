"""What a job would lose if a host, a failure domain or everything were lost now, from its verified copies. Pure.

A loss takes all copies in the memory and on the disks of its hosts; the persistent tier outlives them. What is left is
searched for the newest recovery point, as for a restart. A recovery point goes with a host, or with a failure domain,
that has all copies of one of its ranks.

A job of thousands of hosts has a hundred thousand copies: they are grouped once, and only recovery points that may be
the newest one left are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.checkpoints import Lineage, Point, ShardCopy, Tier, is_alive, world_size_of
from flyball.contracts.recovery import Origin, origin_of


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


class _PointCopies(msgspec.Struct, frozen=True):
    """A recovery point, with all copies of the ranks that saved it."""

    point: Point
    copies: Sequence[ShardCopy]
    has_persistent: bool


def worst_cases(
    copies: Sequence[ShardCopy], lineage: Lineage, world_size: int, homes: Mapping[int, str], domains: Mapping[str, str]
) -> tuple[WorstCase, ...]:
    """The worst case of each loss. `copies`: those within reach. `homes`: rank -> its host. `domains`: host -> failure
    domain; a host without one is a domain of its own. Empty for a job without ranks."""
    if not homes:
        return ()
    points = _newest_first(copies, lineage, world_size)
    hosts = {copy.host_id for copy in copies} | set(homes.values())
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
        newest = _newest_left(points, unit_of, {unit_of[host] for host in homes.values()})
        name = max(sorted(newest), key=lambda unit: newest[unit])
        found.append(case(lost, newest, name, {host for host, unit in unit_of.items() if unit == name}))
    return tuple(found)


def _newest_first(copies: Iterable[ShardCopy], lineage: Lineage, world_size: int) -> list[_PointCopies]:
    """The recovery points of the history, the newest first."""
    place = {entry.generation: number for number, entry in enumerate(lineage)}
    saved_by = {entry.generation: entry.world_size or world_size for entry in reversed(lineage)}
    groups: defaultdict[Point, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        groups[copy.step, copy.generation].append(copy)
    found = []
    for point, group in groups.items():
        step, generation = point
        ranks = saved_by.get(generation, 0)
        kept = [copy for copy in group if copy.rank < ranks]
        if ranks and len({copy.rank for copy in kept}) == ranks and is_alive(generation, step, lineage):
            found.append(_PointCopies(point, kept, Tier.PERSISTENT in {copy.tier for copy in kept}))
    return sorted(found, key=lambda one: (place[one.point[1]], one.point[0]), reverse=True)


def _newest_left(points: Sequence[_PointCopies], unit_of: Mapping[str, str], units: set[str]) -> dict[str, int]:
    """Each unit -> the place in `points` of the newest one that outlives its loss; their number if none does."""
    found: dict[str, int] = {}
    undecided, is_one_unit = set(units), len(set(unit_of.values())) == 1
    for place, point in enumerate(points):
        if not undecided:
            break
        if is_one_unit and not point.has_persistent:
            continue
        needed = _needed_units(point.copies, unit_of)
        found.update(dict.fromkeys(undecided - needed, place))
        undecided &= needed
    return found | dict.fromkeys(undecided, len(points))


def _needed_units(copies: Iterable[ShardCopy], unit_of: Mapping[str, str]) -> set[str | None]:
    """The units each of which has all copies of some rank; None may be among them."""
    only: dict[int, str | None] = {}  # rank -> the unit that has all its copies; None: there is no such unit
    for copy in copies:
        rank = copy.rank
        unit = None if copy.tier is Tier.PERSISTENT else unit_of[copy.host_id]
        if only.setdefault(rank, unit) != unit:
            only[rank] = None
    return set(only.values())


_AT_HOME: Mapping[Tier, Origin] = {tier: origin_of(tier, "host", "host") for tier in Tier}
_ELSEWHERE: Mapping[Tier, Origin] = {tier: origin_of(tier, "host", "") for tier in Tier}


def _homes_at(point: Point, lineage: Lineage, world_size: int, homes: Mapping[int, str]) -> Mapping[int, str]:
    """Rank -> its host, if as many ranks saved this point: else any host may need any shard."""
    return homes if world_size_of(point[1], lineage, of_job=world_size) == world_size else {}


def _slowest_tier(left: _PointCopies, homes: Mapping[int, str], lost_hosts: Collection[str]) -> Tier:
    """The slowest tier that a rank would read from, if each takes its nearest copy. A rank whose host is lost starts
    elsewhere."""
    nearest: dict[int, Origin] = {}
    for copy in left.copies:
        rank, host = copy.rank, copy.host_id
        if host in lost_hosts and copy.tier is not Tier.PERSISTENT:
            continue
        origin = (_AT_HOME if host == homes.get(rank) else _ELSEWHERE)[copy.tier]
        if origin < nearest.get(rank, Origin.PERSISTENT):
            nearest[rank] = origin
        else:
            nearest.setdefault(rank, origin)
    return max(nearest.values()).tier
