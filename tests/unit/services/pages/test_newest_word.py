"""What is complete in a tier, though its hosts said what they hold at different moments."""

from __future__ import annotations

from flyball.contracts.checkpoints import Lineage, LineageEntry, Point, Tier
from services.rules.holdings import CopyFacts, Holding, by_newest_word, complete_points, held

LINEAGE: Lineage = (LineageEntry(1, 7), LineageEntry(2, None))


def memory(host: str, rank: int, *points: Point) -> list[Holding]:
    return held(host, "job", [CopyFacts("job", generation, step, rank, Tier.MEMORY, 8) for step, generation in points])


def complete(*hosts: list[Holding]) -> list[Point]:
    holdings = [one for host in hosts for one in host]
    return list(complete_points(by_newest_word(holdings, LINEAGE, len(hosts)), LINEAGE, len(hosts)))


def test_a_host_that_spoke_later_still_counts_for_the_step_that_another_spoke_of() -> None:
    early, late = memory("a", 0, (9, 2), (10, 2)), memory("b", 1, (12, 2), (13, 2))
    assert list(complete_points([*early, *late], LINEAGE, 2)) == [], "taken literally, a memory full of steps has none"
    assert complete(early, late) == [(10, 2)]
    assert complete(memory("a", 0, (10, 2), (11, 2)), late) == [(11, 2)]


def test_a_step_that_both_hold_is_the_newest_though_one_began_the_next() -> None:
    assert complete(memory("a", 0, (10, 2), (11, 2)), memory("b", 1, (9, 2), (10, 2))) == [(10, 2)]


def test_a_rank_without_any_copy_leaves_no_step_complete() -> None:
    assert complete(memory("a", 0, (10, 2)), []) == []


def test_after_a_restart_the_word_of_before_it_counts_unless_it_is_beyond_the_branch() -> None:
    restarted = memory("a", 0, (8, 2), (9, 2))
    assert complete(restarted, memory("b", 1, (6, 1), (7, 1))) == [(7, 1)]
    assert complete(restarted, memory("b", 1, (8, 1), (9, 1))) == [], "those steps were given up"


def test_sizes_are_those_of_what_is_there() -> None:
    holdings = [*memory("a", 0, (9, 2)), *memory("b", 1, (12, 2))]
    assert sum(one.copies for one in by_newest_word(holdings, LINEAGE, 2)) == 2
