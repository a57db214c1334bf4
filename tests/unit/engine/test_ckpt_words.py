"""The wording of `flyball ckpt` for bad copies, many ranks and steps."""

from __future__ import annotations

import pytest

from ckpt_engine.inspect.tier_folders import find_in_folder
from ckpt_engine.inspect.verify_copies import CopyVerdict, Verified, judge_steps
from flyball.cli.ckpt.options import parse_step, storage_tiers
from flyball.cli.ckpt.tables import ranks_text
from flyball.cli.ckpt.verify import advice, describe
from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.errors import UsageError


def verified(verdict: CopyVerdict, tier: Tier = Tier.DISK, *, rank: int = 0, bad: tuple[int, ...] = ()) -> Verified:
    copy = ShardCopy("job", 1, 4, rank, tier, "host-a", 10, "ab")
    return Verified(copy, "/disk/x", verdict, "The copy ends early." if not bad else "", 8, 1 << 20, bad)


def test_a_bad_copy_is_described_by_its_first_chunk() -> None:
    assert describe(verified(CopyVerdict.BAD, bad=(3,))) == (
        "chunk 3 of 8 (from byte 3145728) does not match its checksum"
    )
    assert describe(verified(CopyVerdict.BAD, bad=(3, 4, 7))).endswith(", and 2 more")
    assert describe(verified(CopyVerdict.BAD)) == "The copy ends early."


def test_advice_depends_on_the_other_copies() -> None:
    bad = verified(CopyVerdict.BAD)
    assert "good copy in memory or peer" in advice(
        bad, [verified(CopyVerdict.GOOD, Tier.PEER), verified(CopyVerdict.GOOD, Tier.MEMORY)]
    )
    assert "another copy of this rank" in advice(bad, [verified(CopyVerdict.GOOD, Tier.PEER, rank=1)])
    assert advice(verified(CopyVerdict.GONE), []).startswith("nothing")


def test_many_ranks_are_counted() -> None:
    assert ranks_text([0, 3]) == "0, 3"
    assert ranks_text(range(64)) == "0, 1, 2, 3, 4, 5, 6, 7, ... (64)"


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "٣", "9" * 19, "1 2"])
def test_invalid_steps_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_step(text)


def test_steps_and_tiers_by_name() -> None:
    assert (parse_step("latest"), parse_step("0"), parse_step("120")) == (None, 0, 120)
    assert set(storage_tiers(None)) == {Tier.DISK, Tier.PERSISTENT}
    assert set(storage_tiers(Tier.DISK)) == {Tier.DISK}
    with pytest.raises(UsageError):
        storage_tiers(Tier.PEER)


def test_a_step_without_a_good_copy_of_some_rank_is_not_whole() -> None:
    (step,) = judge_steps([], {(1, 4): 2})
    assert (step.is_whole, step.missing_ranks, step.problems) == (False, (0, 1), ())


def test_folders_without_tiers_have_no_copies(tmp_path) -> None:
    (tmp_path / "UPPER" / "g1").mkdir(parents=True)
    (tmp_path / "notes" / "deep" / "deeper" / "g1").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    assert find_in_folder(tmp_path) == []
