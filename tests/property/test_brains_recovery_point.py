"""The recovery point is the newest step that every rank can really be restored from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier, branch, is_alive, newest_point
from flyball.contracts.cluster import HostRanks
from flyball.contracts.recovery import complete_points
from services.rules.recovery_point import before, newest_step, plan_restore

HOSTS = ("a", "b", "c")

copies_of = st.lists(
    st.builds(
        ShardCopy,
        job=st.just("job"),
        generation=st.integers(1, 3),
        step=st.integers(0, 6),
        rank=st.integers(0, 3),
        tier=st.sampled_from(list(Tier)),
        host_id=st.sampled_from(HOSTS),
        size_bytes=st.just(1),
        digest=st.just("d"),
    ),
    max_size=60,
)
maybe_step = st.none() | st.integers(0, 6)
lineages = st.lists(
    st.builds(LineageEntry, st.integers(1, 3), maybe_step, maybe_step), max_size=3, unique_by=lambda e: e.generation
).map(lambda entries: tuple(sorted(entries, key=lambda entry: entry.generation)))
worlds = st.integers(1, 4)
reachable = st.sets(st.sampled_from(HOSTS))


def newest(copies: list[ShardCopy], lineage: tuple[LineageEntry, ...], world_size: int) -> int | None:
    """By brute force: the last step that all ranks have from the last generation that counts and made such a step."""
    complete = [
        step
        for generation in range(1, 4)
        for step in range(7)
        if is_alive(generation, step, lineage)
        and all(any((c.generation, c.step, c.rank) == (generation, step, r) for c in copies) for r in range(world_size))
    ]
    return complete[-1] if complete else None


@given(copies_of, lineages, worlds)
def test_it_is_the_newest_complete_step(
    copies: list[ShardCopy], lineage: tuple[LineageEntry, ...], world_size: int
) -> None:
    assert newest_step(copies, lineage, world_size) == newest(copies, lineage, world_size)


@given(copies_of, lineages, worlds, reachable, st.permutations(HOSTS))
def test_every_rank_has_a_source_within_reach(
    copies: list[ShardCopy],
    lineage: tuple[LineageEntry, ...],
    world_size: int,
    in_reach: set[str],
    placement: list[str],
) -> None:
    hosts = [HostRanks(placement[rank % 2], "ip", "", (rank,)) for rank in range(world_size)]
    addresses = {host: f"{host}:7" for host in in_reach}
    plan = plan_restore(copies, lineage, world_size, addresses, hosts)
    home = {rank: host.host_id for host in hosts for rank in host.ranks}
    usable = [c for c in copies if c.tier is Tier.PERSISTENT or c.host_id in in_reach or c.host_id == home.get(c.rank)]
    expected = newest(usable, lineage, world_size)
    if plan is None:
        assert expected is None
        return
    assert plan.step == expected
    assert set(plan.sources) == {str(rank) for rank in range(world_size)}
    for rank, sources in plan.sources.items():
        assert sources and len(set(sources)) == len(sources)
        assert len({source.generation for source in sources}) == 1
        local_first = [
            source.host_id == home[int(rank)] for source in sources if source.tier in (Tier.MEMORY, Tier.PEER)
        ]
        assert local_first == sorted(local_first, reverse=True)
        for source in sources:
            assert any(
                (c.generation, c.step, c.rank, c.tier, c.host_id)
                == (source.generation, plan.step, int(rank), source.tier, source.host_id)
                for c in copies
            )
            is_local = source.tier is Tier.PERSISTENT or source.host_id == home[int(rank)]
            assert source.engine_address == ("" if is_local else f"{source.host_id}:7")


@given(copies_of, lineages, worlds)
def test_what_is_branched_off_is_never_restored_again(
    copies: list[ShardCopy], lineage: tuple[LineageEntry, ...], world_size: int
) -> None:
    point = newest_point(complete_points(copies, lineage, world_size), lineage)
    step, source = point or (None, None)
    after = branch(lineage, restored_step=step, generation=9, source=source)
    assert newest_point(complete_points(copies, after, world_size), after) == point
    assert all(entry.upto_step is None or entry.upto_step <= step for entry in after if step is not None)
    assert all(entry.after_step is None for entry in after), "nothing is in doubt once a copy was found"
    if step is not None:
        older = newest_step(copies, before(lineage, step), world_size)
        assert older is None or older < step


def test_what_comes_before_a_step_leaves_older_ends_where_they_are() -> None:
    assert before((LineageEntry(1, 3), LineageEntry(2)), 10) == (LineageEntry(1, 3), LineageEntry(2, 9))


def test_a_copy_on_a_host_without_an_engine_serves_the_ranks_beside_it_only() -> None:
    lineage = (LineageEntry(1),)
    hosts = [HostRanks("a", "ip", "", (0,)), HostRanks("b", "ip", "", (1,))]

    def plan(on: str, addresses: dict[str, str]) -> dict[str, list[tuple[str, str]]] | None:
        copies = [
            ShardCopy("job", 1, 5, 0, Tier.DISK, on, 1, "d"),
            ShardCopy("job", 1, 5, 1, Tier.PERSISTENT, "", 1, "d"),
            ShardCopy("job", 1, 5, 2, Tier.MEMORY, "a", 1, "d"),  # of a rank that is no more
        ]
        found = plan_restore(copies, lineage, 2, addresses, hosts)
        assert found is None or found.step == 5
        if found is None:
            return None
        return {rank: [(s.host_id, s.engine_address) for s in sources] for rank, sources in found.sources.items()}

    assert plan("a", {}) == plan("a", {"a": "a:7"}) == {"0": [("a", "")], "1": [("", "")]}
    assert plan("c", {}) is None and plan("c", {"c": ""}) is None
    assert plan("c", {"c": "c:7"}) == {"0": [("c", "c:7")], "1": [("", "")]}


@given(copies_of, st.lists(st.integers(0, 4), min_size=3, max_size=3), worlds, reachable)
def test_a_step_counts_if_all_ranks_that_saved_it_have_a_copy(
    copies: list[ShardCopy], saved_by: list[int], world_size: int, in_reach: set[str]
) -> None:
    """Whatever the number of ranks that restore it; 0: as many as those. Any of their hosts can then have any shard."""
    lineage = tuple(LineageEntry(number, 2 * number, world_size=saved_by[number - 1]) for number in (1, 2, 3))
    addresses = {host: f"{host}:7" for host in in_reach}
    hosts = [HostRanks(HOSTS[rank % 3], "ip", "", (rank,)) for rank in range(world_size)]
    expected = set()
    for generation in (1, 2, 3):
        ranks = saved_by[generation - 1] or world_size
        for step in range(2 * generation + 1):
            there = {copy.rank for copy in copies if (copy.generation, copy.step) == (generation, step)}
            if set(range(ranks)) <= there:
                expected.add((step, generation))
    assert complete_points(copies, lineage, world_size) == expected

    plan = plan_restore(copies, lineage, world_size, addresses, hosts)
    if plan is not None:
        ranks = saved_by[plan.source_generation - 1] or world_size
        assert plan.sources.keys() == {str(rank) for rank in range(ranks)}
        if ranks != world_size:
            found = [source for sources in plan.sources.values() for source in sources]
            assert all(source.tier is Tier.PERSISTENT or source.engine_address for source in found)
