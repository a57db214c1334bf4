"""The order of restore sources, and what may be removed from a disk, for arbitrary input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.rules.fetch_order import fetch_order, source_generation
from ckpt_engine.rules.retention_rules import removable
from flyball.contracts.checkpoints import LineageEntry, RestorePlan, ShardCopy, ShardSource, Tier, is_alive
from flyball.contracts.recovery import Origin

HOSTS = ("here", "there", "elsewhere")

sources = st.builds(
    ShardSource,
    rank=st.just(0),
    generation=st.just(3),
    tier=st.sampled_from(Tier),
    host_id=st.sampled_from(HOSTS),
    engine_address=st.sampled_from(("", "10.0.0.1:7")),
)


@given(st.lists(sources, max_size=8))
def test_sources_come_nearest_first_and_none_that_can_be_asked_is_lost(given_sources: list[ShardSource]) -> None:
    steps = fetch_order(RestorePlan(9, {"0": tuple(given_sources)}), 0, host_id="here")
    assert [step.origin for step in steps] == sorted(step.origin for step in steps)
    for source in given_sources:
        local_slot = source.tier is Tier.MEMORY and source.host_id == "here"
        local = source.host_id == "here" or source.tier is Tier.PERSISTENT
        expected = not local_slot and (local or bool(source.engine_address))
        assert (source in [step.source for step in steps]) == expected
    for origin in Origin:  # among equals the controller's order holds
        chosen = [step.source for step in steps if step.origin is origin]
        assert chosen == [source for source in given_sources if source in chosen]


def test_bytes_from_another_hosts_memory_are_a_peers_whatever_they_were_there() -> None:
    assert {origin: origin.tier for origin in Origin} == {
        Origin.LOCAL_SLOT: Tier.MEMORY,
        Origin.LOCAL_REPLICA: Tier.PEER,
        Origin.REMOTE_MEMORY: Tier.PEER,
        Origin.LOCAL_DISK: Tier.DISK,
        Origin.REMOTE_DISK: Tier.DISK,
        Origin.PERSISTENT: Tier.PERSISTENT,
    }


def test_a_rank_without_sources_has_nothing_to_try() -> None:
    plan = RestorePlan(9, {"1": ()})
    assert fetch_order(plan, 0, host_id="here") == ()
    assert source_generation(plan, 0) is None


copies = st.builds(
    ShardCopy,
    job=st.just("job"),
    generation=st.sampled_from((1, 2)),
    step=st.integers(0, 6),
    rank=st.integers(0, 1),
    tier=st.just(Tier.DISK),
    host_id=st.just("here"),
    size_bytes=st.just(1),
    digest=st.just(""),
)
LINEAGE = (LineageEntry(1, 3), LineageEntry(2))


@given(st.lists(copies, max_size=20, unique_by=lambda copy: (copy.generation, copy.step, copy.rank)))
def test_what_is_removed_leaves_the_newest_complete_steps(found: list[ShardCopy]) -> None:
    held = [{c.step for c in found if c.rank == rank and is_alive(c.generation, c.step, LINEAGE)} for rank in (0, 1)]
    kept = tuple(sorted(held[0] & held[1])[-2:])
    named = max((copy.step for copy in found), default=3)
    gone = removable(found, naming=TierNaming(Tier.DISK, named, kept), lineage=LINEAGE, ranks=(0,))
    assert all(copy.rank == 0 for copy in gone)

    def complete(left: list[ShardCopy]) -> list[int]:
        ranks: dict[int, set[int]] = {}
        for copy in left:
            if is_alive(copy.generation, copy.step, LINEAGE):
                ranks.setdefault(copy.step, set()).add(copy.rank)
        return sorted(step for step, have in ranks.items() if have == {0, 1})

    before, after = complete(found), complete([copy for copy in found if copy not in gone])
    assert after[-2:] == before[-2:]
    if not before:
        assert all(copy.generation == 2 for copy in gone)  # of the running generation, and passed by
