"""Lists of hosts and ranks: where they are cut off, and what is counted instead."""

from __future__ import annotations

from services.rules.wording import explained, kept, listed, ranges, ranks_by_host, ranks_kept, ranks_of


def names(count: int) -> list[str]:
    return [f"h{number}" for number in range(count)]


def test_names_are_cut_off_after_eight_and_in_evidence_after_sixty_four() -> None:
    assert listed(names(3)) == "h0, h1, h2"
    assert listed(names(8)).endswith(", h7") and listed(names(9)) == f"{listed(names(8))} and 1 more"
    assert kept(names(64)) == ",".join(names(64))
    assert kept(names(66)) == f"{kept(names(64))},and 2 more"


def test_three_ranks_in_a_row_are_a_range() -> None:
    assert ranges([7, 5, 6, 1, 2, 6]) == "1, 2, 5-7"
    assert ranges([]) == "" and ranges([4]) == "4"
    apart = [3 * number for number in range(16)]
    assert ranges(apart) == ", ".join(map(str, apart))
    assert ranges([*apart, 100, 101, 102, 110]) == f"{ranges(apart)} and 4 more"
    assert ranges([*apart[:15], 100, 101, 110]) == f"{ranges(apart[:15])}, 100, 101 and 1 more"


def test_evidence_names_few_ranks_each_and_many_in_ranges() -> None:
    assert ranks_kept(range(63, -1, -1)) == ",".join(map(str, range(64)))
    assert ranks_kept([*range(64), 66]) == "0-63,66"


def test_ranks_are_counted_by_rank_and_by_host() -> None:
    assert (ranks_of([3, 3]), ranks_of([3, 4])) == ("rank 3", "ranks 3, 4")
    assert ranks_by_host([1], {1: "a"}) == "Rank 1 on a"
    assert ranks_by_host([1, 0, 2], {0: "a", 1: "b", 2: "a"}) == "Ranks 0, 2 on a and 1 on b"
    assert ranks_by_host(range(8), dict(enumerate(names(8)))).count(" on ") == 8
    assert ranks_by_host(range(9), dict(enumerate(names(9)))) == "Ranks 0-8 on 9 hosts"


def test_ranks_without_a_known_host_come_last() -> None:
    assert ranks_by_host([1, 0, 2], {0: "a", 2: "b"}) == "Ranks 0 on a, 2 on b and 1 (host unknown)"
    assert ranks_by_host([], {}) == "Some ranks"


def test_a_sentence_ends_in_one_full_stop_and_a_colon_has_something_behind_it() -> None:
    assert (explained("b is gone", "no power. "), explained("b is gone", " ")) == ("b is gone: no power.", "b is gone.")
