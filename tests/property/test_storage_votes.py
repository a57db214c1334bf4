"""The coordinator agrees only to what all ranks have written by the same plans, and never changes its mind about a
step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.contracts.generation import WorldView
from ckpt_engine.contracts.peer_wire import (
    StorageDecision,
    StorageStage,
    StorageVote,
    TierNaming,
    TierReport,
    WorldStep,
)
from ckpt_engine.rules.storage_votes import StorageVotes
from ckpt_engine.rules.tier_schedule import TierSchedule
from flyball.contracts.checkpoints import Tier, TierPolicy

RANKS = 4
PLANS = ("1" * 32, "2" * 32)


def file_vote(step: int, plan: str = PLANS[0], members: int = RANKS) -> StorageVote:
    return StorageVote(step, StorageStage.FILE, plan, members)


votes = st.builds(
    StorageVote,
    st.integers(3, 4),
    st.sampled_from(StorageStage),
    st.sampled_from(PLANS),
    st.integers(1, RANKS),
)


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), votes), max_size=30))
def test_it_agrees_only_to_complete_plans_and_never_takes_a_decision_back(
    reported: list[tuple[int, StorageVote]],
) -> None:
    coordinator = StorageVotes(RANKS)
    newest: dict[int, StorageVote] = {}
    before = StorageDecision.OPEN
    for rank, vote in reported:
        coordinator.take(rank, vote)
        newest[rank] = vote
        decision = coordinator.decision(3)
        if before is not StorageDecision.OPEN:
            assert decision is before
        here = [known for known in newest.values() if known.step == 3]
        if decision is StorageDecision.AGREED and before is StorageDecision.OPEN:
            files = [known for known in here if known.stage is StorageStage.FILE]
            another_agreed = any(known.stage is StorageStage.MANIFEST for known in here)
            fits = all(sum(other == known for other in files) == known.members for known in files)
            no_whole = all(known.stage is not StorageStage.WHOLE for known in here)
            assert another_agreed or (len(here) == RANKS and files and fits and no_whole)
        before = decision


@pytest.mark.parametrize(
    ("cast", "decision"),
    [
        ([], StorageDecision.OPEN),
        ([file_vote(3)] * 3, StorageDecision.OPEN),
        ([file_vote(3)] * 4, StorageDecision.AGREED),
        ([file_vote(2)] * 4, StorageDecision.OPEN),
        ([file_vote(3)] * 3 + [file_vote(2)], StorageDecision.OPEN),
        ([file_vote(3)] * 3 + [file_vote(3, PLANS[1])], StorageDecision.GIVEN_UP),
        ([file_vote(3, PLANS[0], 2)] * 2 + [file_vote(3, PLANS[1], 2)] * 2, StorageDecision.AGREED),
        ([file_vote(3, members=3)] * 3 + [StorageVote(3, StorageStage.ALONE)], StorageDecision.AGREED),
        ([file_vote(3)] * 3 + [StorageVote(3, StorageStage.ALONE)], StorageDecision.GIVEN_UP),
        ([StorageVote(3, StorageStage.ALONE)] * 4, StorageDecision.OPEN),
        ([StorageVote(3, StorageStage.WHOLE)], StorageDecision.GIVEN_UP),
        ([file_vote(3), StorageVote(3, StorageStage.MANIFEST, PLANS[0], 4)], StorageDecision.AGREED),
    ],
)
def test_what_votes_lead_to(cast: list[StorageVote], decision: StorageDecision) -> None:
    coordinator = StorageVotes(RANKS)
    for rank, vote in enumerate(cast):
        coordinator.take(rank, vote)
    assert coordinator.decision(3) is decision


def test_after_three_failures_in_a_row_eight_steps_are_left_out() -> None:
    coordinator = StorageVotes(1)
    decided = []
    for step in range(14):
        early = coordinator.decision(step)
        coordinator.take(0, StorageVote(step, StorageStage.WHOLE) if step < 3 else file_vote(step, members=1))
        decided.append((early, coordinator.decision(step)))
    failed = (StorageDecision.OPEN, StorageDecision.GIVEN_UP)
    left_out = (StorageDecision.GIVEN_UP, StorageDecision.GIVEN_UP)
    agreed = (StorageDecision.OPEN, StorageDecision.AGREED)
    assert decided == [failed] * 3 + [left_out] * 8 + [agreed] * 3


def test_the_decision_travels_with_the_name_of_the_step_and_survives_a_coordinator_that_forgot_it() -> None:
    tier = Tier.PERSISTENT
    schedule = TierSchedule(
        tier, policy=TierPolicy(1, keep_latest=1), world_size=2, restore_step=-1, first_step=0, sealed=True
    )
    schedule.seal_report(TierReport(tier, -1, -1))
    for rank in range(2):
        schedule.report(rank, TierReport(tier, -1, -1))
    schedule.offer([0], 0.0)
    world = WorldView(WorldStep("job", 1, -1))
    for rank in range(2):
        assert schedule.naming == TierNaming(tier, 0)
        schedule.report(rank, TierReport(tier, 0, -1, vote=file_vote(0, members=2)))
    agreed = TierNaming(tier, 0, together=StorageDecision.AGREED)
    assert schedule.naming == agreed
    assert world.learn(WorldStep("job", 1, -1, tiers=(agreed,)))
    assert not world.learn(WorldStep("job", 1, -1, tiers=(TierNaming(tier, 0),))), "of a coordinator that restarted"
    assert world.present.tiers == (agreed,)
    assert world.learn(WorldStep("job", 1, -1, tiers=(TierNaming(tier, 1),)))
    assert world.present.tiers == (TierNaming(tier, 1),)
