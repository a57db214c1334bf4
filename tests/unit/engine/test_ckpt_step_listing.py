"""How copies add up to steps: which are complete, which count, and which is the recovery point."""

from __future__ import annotations

from ckpt_engine.format.step_listing import infer_lineage, list_steps
from flyball.cli.ckpt.tables import age_s, age_text
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier, is_alive


def copy(step: int, rank: int, tier: Tier = Tier.MEMORY, *, generation: int = 1, host: str = "a") -> ShardCopy:
    return ShardCopy("job", generation, step, rank, tier, "" if tier is Tier.PERSISTENT else host, 10 + rank, "ab")


def test_a_step_is_complete_with_any_tier_per_rank() -> None:
    copies = [copy(4, 0), copy(4, 1, Tier.DISK, host="b"), copy(5, 0), copy(3, 0), copy(3, 1), copy(3, 1, Tier.PEER)]
    steps = list_steps(copies, lineage=(LineageEntry(1),), world_sizes={(1, s): 2 for s in (3, 4, 5)})
    assert [(s.step, s.complete, s.recovery_point, s.missing_ranks) for s in steps] == [
        (5, False, False, (1,)),
        (4, True, True, ()),
        (3, True, False, ()),
    ]
    assert steps[1].size_bytes == 21
    assert [(t.tier, t.hosts, t.ranks) for t in steps[1].tiers] == [
        (Tier.MEMORY, ("a",), (0,)),
        (Tier.DISK, ("b",), (1,)),
    ]
    assert steps[2].size_bytes == 21  # one copy per rank, however many there are


def test_an_unsealed_persistent_step_does_not_count() -> None:
    copies = [copy(4, rank, Tier.PERSISTENT) for rank in (0, 1)] + [copy(2, rank, Tier.PERSISTENT) for rank in (0, 1)]
    steps = list_steps(copies, lineage=(LineageEntry(1),), world_sizes={(1, 4): 2, (1, 2): 2}, unsealed={(1, 4)})
    assert [(s.step, s.complete, s.recovery_point, s.tiers[0].counts) for s in steps] == [
        (4, False, False, False),
        (2, True, True, True),
    ]


def test_steps_that_a_restart_gave_up_are_dead_and_never_the_recovery_point() -> None:
    copies = [copy(9, 0), copy(5, 0), copy(6, 0, generation=2)]
    lineage = (LineageEntry(1, 5), LineageEntry(2))
    steps = list_steps(copies, lineage=lineage, world_sizes={(1, 9): 1, (1, 5): 1, (2, 6): 1})
    assert [(s.step, s.alive, s.recovery_point) for s in steps] == [
        (6, True, True),
        (5, True, False),
        (9, False, False),
    ]


def test_an_unrecorded_lineage_is_inferred_from_the_generations_first_steps() -> None:
    lineage = infer_lineage([(1, 2), (1, 9), (2, 6), (2, 11), (4, 8)])
    assert lineage == (LineageEntry(1, 5), LineageEntry(2, 7), LineageEntry(4, None))
    assert is_alive(1, 2, lineage)
    assert not is_alive(1, 9, lineage)
    assert not is_alive(2, 11, lineage)
    assert infer_lineage([]) == ()


def test_the_world_may_change_its_size_between_generations() -> None:
    copies = [copy(3, rank) for rank in range(4)] + [copy(5, rank, generation=2) for rank in range(2)]
    steps = list_steps(copies, lineage=(LineageEntry(1, 3), LineageEntry(2)), world_sizes={(1, 3): 4, (2, 5): 2})
    assert [(s.step, s.world_size, s.complete) for s in steps] == [(5, 2, True), (3, 4, True)]


def test_a_steps_age_comes_from_a_manifest_and_is_never_negative() -> None:
    copies = [copy(step, 0) for step in (3, 4, 5)]
    steps = list_steps(
        copies,
        lineage=(LineageEntry(1),),
        world_sizes={(1, step): 1 for step in (3, 4, 5)},
        committed_at={
            (1, 3): 900.0,
            (1, 4): 1_050.0,
            (1, 5): 0.0,
        },  # another clock; a manifest without a time
    )
    assert [(s.step, s.committed_at, age_s(s, 1_000.0)) for s in steps] == [
        (5, None, None),
        (4, 1_050.0, 0.0),
        (3, 900.0, 100.0),
    ]
    texts = [age_text(seconds) for seconds in (0.4, 59.9, 60.0, 3_599.0, 7_200.0, 200_000.0, None)]
    assert texts == ["0 s", "59 s", "1 min", "59 min", "2 h", "2 d", None]
