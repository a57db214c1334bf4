"""What a job would lose: compared with removing the hosts one by one, and asking for the newest recovery point."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.checkpoints import LineageEntry, Point, ShardCopy, Tier, newest_point
from flyball.contracts.cluster import HostRanks
from flyball.contracts.recovery import complete_points, origin_of
from services.rules.holdings import CopyFacts, Holding, held
from services.rules.recoverability import Lost, WorstCase, worst_cases
from services.rules.recovery_point import plan_restore

RANKS, HOSTS = 3, ("a", "b", "c", "d")
LINEAGES = ((LineageEntry(2),), (LineageEntry(1, 2), LineageEntry(2)), (LineageEntry(1, 9), LineageEntry(2, None, 1)))
HOMES = {"a": (0, 1), "b": (2,)}


@st.composite
def copies_of(draw: st.DrawFn) -> list[ShardCopy]:
    copies = draw(
        st.sets(
            st.tuples(
                *(st.integers(1, 2), st.integers(1, 3), st.integers(0, RANKS - 1), st.sampled_from(Tier)),
                st.sampled_from(HOSTS),
            ),
            max_size=40,
        )
    )
    return [
        ShardCopy("job", generation, step, rank, tier, "" if tier is Tier.PERSISTENT else host, 1, "d")
        for generation, step, rank, tier, host in sorted(copies)
    ]


def holdings_of(copies: list[ShardCopy]) -> list[Holding]:
    slim = [(copy.host_id, msgspec.convert(msgspec.to_builtins(copy), CopyFacts)) for copy in copies]
    return [one for host in ("", *HOSTS) for one in held(host, "job", [copy for at, copy in slim if at == host])]


domains_of = st.fixed_dictionaries({host: st.sampled_from(["", "rack-1", "rack-2"]) for host in HOSTS})


def order(point: Point | None, lineage: tuple[LineageEntry, ...]) -> tuple[int, int]:
    """A key by which a later point is greater."""
    if point is None:
        return -1, -1
    return [entry.generation for entry in lineage].index(point[1]), point[0]


@settings(max_examples=300, deadline=None)
@given(copies_of(), st.sampled_from(LINEAGES), domains_of)
def test_the_worst_case_is_that_of_removing_each(
    copies: list[ShardCopy], lineage: tuple[LineageEntry, ...], domains: dict[str, str]
) -> None:
    def left_without(lost: set[str]) -> list[ShardCopy]:
        return [copy for copy in copies if copy.tier is Tier.PERSISTENT or copy.host_id not in lost]

    def point_of(left: list[ShardCopy]) -> Point | None:
        return newest_point(complete_points(left, lineage, RANKS), lineage)

    def check(case: WorstCase, units: dict[str, set[str]]) -> None:
        points = {name: point_of(left_without(lost)) for name, lost in units.items()}
        worst = min(order(point, lineage) for point in points.values())
        assert case.name == min(name for name in points if order(points[name], lineage) == worst)
        assert case.recovery_step == (-1 if points[case.name] is None else worst[1])
        now = order(point_of(copies), lineage)
        assert case.costly_cases == sum(1 for point in points.values() if order(point, lineage) < now)
        assert case.cases == len(units)
        assert case.tier == slowest(units[case.name])

    def slowest(lost: set[str]) -> Tier | None:
        """As a restart would read, whose ranks stay where their hosts are, and go to a new host otherwise."""
        hosts = [HostRanks(host, "", f"{host}:1", ranks) for host, ranks in HOMES.items()]
        placed = [host for host in hosts if host.host_id not in lost]
        reach = {host: f"{host}:1" for host in HOSTS if host not in lost}
        plan = plan_restore(left_without(lost), lineage, RANKS, reach, placed)
        if plan is None:
            return None
        has_homes = next((e.world_size for e in lineage if e.generation == plan.source_generation), 0) in (0, RANKS)
        home = {r: host.host_id for host in placed for r in host.ranks} if has_homes else {}
        first = [sources[0] for sources in plan.sources.values()]
        return max(origin_of(source.tier, source.host_id, home.get(source.rank, "")) for source in first).tier

    processes, host, domain, everything = worst_cases(holdings_of(copies), lineage, RANKS, HOMES, domains)
    check(processes, {"": set()})
    check(host, {name: {name} for name in HOMES})
    unit = {name: domains[name] or name for name in HOSTS}
    check(domain, {unit[home]: {name for name in HOSTS if unit[name] == unit[home]} for home in HOMES})
    check(everything, {"": set(HOSTS)})
    assert [case.lost for case in (processes, host, domain, everything)] == list(Lost)


def test_a_job_without_ranks_has_nothing_to_lose() -> None:
    assert worst_cases([], (), RANKS, {}, {}) == ()
