"""Which steps of the persistent tier are read, and which are forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.checkpoints import Lineage, LineageEntry, ShardCopy, Tier
from flyball.contracts.recovery import complete_points
from services.record.stored_steps import KEPT_STEPS, MULTIPLES, Wanted, forgettable, is_outdated, restorable

WORLD = 2

world_sizes = st.sampled_from([0, 0, 1, WORLD, WORLD + 1])  # 0: of the job


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    cuts = draw(st.lists(st.integers(0, 60), max_size=3))
    older = (LineageEntry(n, cut, world_size=draw(world_sizes)) for n, cut in enumerate(sorted(cuts), 1))
    return (*older, LineageEntry(len(cuts) + 1, world_size=draw(world_sizes)))


stored = st.dictionaries(
    st.tuples(st.integers(1, 4), st.integers(0, 60)), st.sets(st.integers(0, WORLD), min_size=1), max_size=40
)
wanteds = st.builds(Wanted, lineages(), st.just(WORLD), st.integers(1, 20), st.sampled_from([0, 0, 5, 20]))


def copies_of(held: dict[tuple[int, int], set[int]]) -> list[ShardCopy]:
    return [
        ShardCopy("job", generation, step, rank, Tier.PERSISTENT, "", 1, "d")
        for (generation, step), ranks in held.items()
        for rank in sorted(ranks)
    ]


def read(held: dict[tuple[int, int], set[int]], wanted: Wanted) -> list[tuple[int, int]]:
    def of_step(generation: int, step: int) -> Sequence[ShardCopy]:
        return copies_of({(generation, step): held[generation, step]})

    return restorable(held, wanted, of_step)


def points(copies: list[ShardCopy], lineage: Lineage) -> list[tuple[int, int]]:
    return sorted(complete_points(copies, lineage, WORLD))


@settings(max_examples=300, deadline=None)
@given(stored, wanteds)
def test_what_is_read_has_the_newest_recovery_points_that_the_store_still_has(held, wanted: Wanted) -> None:
    found = read(held, wanted)
    known = points(copies_of(held), wanted.lineage)
    seen = points(copies_of({mark: held[mark] for mark in found}), wanted.lineage)
    assert seen[-wanted.keep_latest :] == known[-wanted.keep_latest :]
    older = seen[: -wanted.keep_latest]
    assert all(wanted.keep_every and step % wanted.keep_every == 0 for step, _ in older)
    assert len(seen) <= wanted.keep_latest + 2


@settings(max_examples=150, deadline=None)
@given(stored, wanteds, st.sets(st.integers(0, 60), max_size=2))
def test_the_newest_recovery_point_before_a_known_harm_is_read_however_many_are_newer(
    held, wanted: Wanted, clean: set[int]
) -> None:
    found = read(held, msgspec.structs.replace(wanted, clean_steps=tuple(sorted(clean))))
    assert {*read(held, wanted)} <= {*found} and len(found) == len({*found})
    seen = points(copies_of({mark: held[mark] for mark in found}), wanted.lineage)
    known = points(copies_of(held), wanted.lineage)
    for step in clean:
        assert [p for p in seen if p[0] <= step][-1:] == [p for p in known if p[0] <= step][-1:]


@settings(max_examples=300, deadline=None)
@given(stored, wanteds, st.integers(0, 60))
def test_nothing_is_forgotten_that_a_restore_may_want_now_or_after_any_branch(held, wanted: Wanted, cut: int) -> None:
    ranks = {mark: sum(rank < wanted.saved_by(mark[0]) for rank in ranks) for mark, ranks in held.items()}
    gone = forgettable(held, wanted, ranks)
    left = {mark: ranks for mark, ranks in held.items() if mark not in gone}
    known, kept = (points(copies_of(part), wanted.lineage) for part in (held, left))
    newest = max(KEPT_STEPS, wanted.keep_latest)
    assert kept[-newest:] == known[-newest:]
    restored = [
        points(copies_of({mark: held[mark] for mark in read(part, wanted)}), wanted.lineage) for part in (held, left)
    ]
    assert restored[0] == restored[1]
    if gone:
        assert len(known) >= newest
        assert gone == sorted(gone, key=lambda mark: (mark[1], mark[0]))
        incomplete = [mark for mark in left if ranks[mark] < wanted.saved_by(mark[0])]
        assert len(left) - len(incomplete) <= newest + MULTIPLES
    # A later generation continues from an older step: what it may want exists if it was kept for this one.
    entries = (
        msgspec.structs.replace(e, upto_step=cut if e.upto_step is None else min(e.upto_step, cut))
        for e in wanted.lineage
    )
    branched = (*entries, LineageEntry(9))
    oldest = kept[-newest][0] if len(kept) >= newest else 0
    before = [point for point in points(copies_of(held), branched) if point[0] >= oldest]
    after = [point for point in points(copies_of(left), branched) if point[0] >= oldest]
    assert after == before


def test_the_newest_multiples_are_kept_for_ever() -> None:
    marks = {(1, step) for step in range(1, 41)}
    wanted = Wanted((LineageEntry(1),), WORLD, keep_latest=2, keep_every=5)
    gone = forgettable(marks, wanted, dict.fromkeys(marks, WORLD))
    assert [step for _, step in gone] == [step for step in range(1, 41 - KEPT_STEPS) if step not in (15, 20)]


def test_a_generation_that_went_back_to_the_beginning_has_its_steps_kept() -> None:
    marks = [(1, 10_000 + 1000 * n) for n in range(KEPT_STEPS)]
    assert is_outdated((1, 9000), marks)
    assert not is_outdated((2, 1000), marks)
    assert not is_outdated((2, 1000), [*marks, (2, 2000)]), "another rank's copy of a later step was reported first"
    assert is_outdated((2, 1000), [(2, 2000 + n) for n in range(KEPT_STEPS)])


def test_a_multiple_that_is_kept_does_not_keep_what_is_between_it_and_the_newest() -> None:
    marks = [(1, 100), *((1, 10_000 + n) for n in range(KEPT_STEPS))]
    assert is_outdated((1, 5000), marks)
