"""Which copies in a disk tier are removable, case by case."""

from __future__ import annotations

import pytest

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.rules.retention_rules import newest_that_fit, removable
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier

LINEAGE = (LineageEntry(1, 10), LineageEntry(2))  # generation 2 runs; it restored step 10 of 1


@pytest.mark.parametrize(
    ("kept", "generation", "step", "goes"),
    [
        ((6, 8), 2, 12, False),  # named, so being written
        ((6, 8), 2, 13, False),
        ((6, 8), 2, 11, True),  # passed by the coordinator: some rank could not write it
        ((6, 8), 2, 8, False),
        ((6, 8), 2, 7, True),
        ((6, 8), 1, 9, False),  # in the lineage, and newer than all kept steps
        ((6, 8), 1, 7, True),
        ((6, 10), 1, 11, False),  # an abandoned branch; nobody knows yet whether step 10 can be restored
        ((6, 11), 1, 11, True),  # the running generation has a step of its own
        ((6, 8), 3, 1, False),  # of a newer generation
        ((), 1, 11, False),  # nothing is complete yet, so anything may be needed
        ((), 1, 3, False),
        ((0,), 1, 11, False),
    ],
)
def test_what_no_restore_will_want_goes(kept: tuple[int, ...], generation: int, step: int, goes: bool) -> None:
    copy = ShardCopy("job", generation, step, 0, Tier.DISK, "", 1, "")
    naming = TierNaming(Tier.DISK, 12, kept)
    assert removable([copy], naming=naming, lineage=LINEAGE, ranks=None) == ([copy] if goes else [])


def test_of_multiples_only_whole_steps_stay() -> None:
    whole, torn = (ShardCopy("job", 2, step, 0, Tier.PERSISTENT, "", 1, "") for step in (15, 20))
    found = removable(
        [whole, torn],
        naming=TierNaming(Tier.PERSISTENT, 30, (28,)),
        lineage=LINEAGE,
        ranks=None,
        keep_every=5,
        sealed={(2, 15)},
    )
    assert found == [torn]


@pytest.mark.parametrize(("most", "steps"), [(6, {10, 15, 20}), (5, {15, 20}), (4, {15, 20}), (2, {20}), (1, {20})])
def test_an_answer_has_the_newest_steps_that_fit_whole_and_always_one(most: int, steps: set[int]) -> None:
    copies = [ShardCopy("job", 2, step, rank, Tier.PERSISTENT, "", 1, "") for step in (10, 15, 20) for rank in (0, 1)]
    found = newest_that_fit(copies, most)
    assert sorted(found) == [copy for copy in copies if copy.step in steps]
    assert newest_that_fit([], most) == []
