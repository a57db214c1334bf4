"""Two to four slots per rank and one rule for overwriting them: no history of saves, failures, delays, kills and lost
hosts ends without a common restorable step. With an extra slot per slow tier no save waits for such a tier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from slots_world import Slots, World

from ckpt_engine.contracts.control_views import AbandonedSteps, KeptStep
from ckpt_engine.rules import slot_rules
from ckpt_engine.rules.coordinator import MAX_ABANDONED, Coordinator
from ckpt_engine.rules.slot_rules import SlotState, SlotView
from flyball.contracts.checkpoints import Lineage

Rule = Callable[[SlotView, int, Lineage, Container[int]], bool]


class ThreeRanks(World):
    ranks = 3


class WithReplicas(World):
    replicas = True


class ThreeRanksWithReplicas(World):
    ranks = 3
    replicas = True


class ThreeSlotsWithReplicas(World):
    ranks = 3
    replicas = True
    slots = 3


class SlowTierAndTwoSlots(World):
    slow_tiers = 1


class SlowTier(World):
    slots = 3
    slow_tiers = 1


class TwoSlowTiersWithReplicas(World):
    ranks = 3
    replicas = True
    slots = 4
    slow_tiers = 2


class Healing(World):
    """After any such walk the world step advances once the faults stop."""

    ranks = 3
    heals = True

    @rule(rank=st.integers(0, 2), reported=st.booleans())
    def run_out_of_time_often(self, rank: int, reported: bool) -> None:
        for _ in range(MAX_ABANDONED + 1):
            self.save_runs_out_of_time(rank, reported)


class HealingWithReplicas(Healing):
    replicas = True


class HealingWithSlowTiers(Healing):
    replicas = True
    slots = 4
    slow_tiers = 2


MODEL = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


FLAWED = settings(  # stop at the first history that shows the flaw, without shrinking it
    MODEL, max_examples=2000, phases=[Phase.generate], print_blob=False
)

WORLDS = [
    *(World, ThreeRanks, WithReplicas, ThreeRanksWithReplicas, ThreeSlotsWithReplicas),
    *(SlowTierAndTwoSlots, SlowTier, TwoSlowTiersWithReplicas),
    *(Healing, HealingWithReplicas, HealingWithSlowTiers),
]


@pytest.mark.parametrize("histories", [40, pytest.param(120, marks=pytest.mark.proof)])
@pytest.mark.parametrize("world", WORLDS)
def test_no_history_ends_without_a_common_restorable_step(world: type[World], histories: int) -> None:
    run_state_machine_as_test(world, settings=settings(MODEL, max_examples=histories))


def _also_the_world_step(slot: SlotView, world_step: int, lineage: Lineage, abandoned: Container[int]) -> bool:
    return slot.state is SlotState.COMMITTED and slot.step <= world_step


def _also_the_older_of_two(slot: SlotView, world_step: int, lineage: Lineage, abandoned: Container[int]) -> bool:
    return slot.state is SlotState.COMMITTED  # as if the rank chose alone


@pytest.mark.parametrize("weaker", [_also_the_world_step, _also_the_older_of_two])
def test_the_model_finds_the_flaw_of_a_weaker_rule(monkeypatch: pytest.MonkeyPatch, weaker: Rule) -> None:
    right = slot_rules.may_overwrite
    monkeypatch.setattr(slot_rules, "may_overwrite", lambda *case: right(*case) or weaker(*case[:4]))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ThreeRanks, settings=FLAWED)


def _nothing(_slots: Iterable[SlotView], _kept: KeptStep) -> set[int]:
    return set()


def _what_this_host_knows(slots: Iterable[SlotView], kept: KeptStep) -> set[int]:
    """As if no news of a newer step could have been lost."""
    return {kept.step} & {slot.step for slot in slots}


def _save_after_a_restart(world: World, *, lost_news: bool) -> None:
    """All are killed when they have a step without replicas. Each then saves two, before anything is replicated."""
    for _ in range(2):
        world.everyone_saves(received=True)
    world.everyone_saves(received=not lost_news)  # the newest step that is also with the peers
    for rank in range(world.ranks):
        world.begin_save(rank)
        world.finish_capture(rank)
    world.kill_all_workers(3)
    for rank in (*range(world.ranks), *range(world.ranks)):
        world.begin_save(rank)
        world.finish_capture(rank)
        world.the_world_step_is_there_for_all()


@pytest.mark.parametrize("lost_news", [False, True])
def test_a_host_that_is_lost_after_a_restart_does_not_take_the_older_step_too(
    monkeypatch: pytest.MonkeyPatch, lost_news: bool
) -> None:
    world = ThreeSlotsWithReplicas()
    world.begin()
    _save_after_a_restart(world, lost_news=lost_news)
    flawed = ThreeSlotsWithReplicas()
    flawed.begin()
    monkeypatch.setattr(slot_rules, "kept_steps", _what_this_host_knows if lost_news else _nothing)
    with pytest.raises(AssertionError, match="after the loss of host"):
        _save_after_a_restart(flawed, lost_news=lost_news)


def test_the_model_finds_a_rule_that_forgets_the_slow_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = slot_rules.may_overwrite
    monkeypatch.setattr(slot_rules, "may_overwrite", lambda *case: right(*case[:4]))
    with pytest.raises(AssertionError, match="while a slow tier wrote it"):
        run_state_machine_as_test(SlowTier, settings=FLAWED)


def test_the_model_finds_a_save_that_waits_for_a_slow_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots are too few with a slow tier: the model must detect that."""
    monkeypatch.setattr(SlowTierAndTwoSlots, "_waits_for_the_world_only", _never_waits)
    with pytest.raises(AssertionError, match="needed by a slow tier alone"):
        run_state_machine_as_test(SlowTierAndTwoSlots, settings=FLAWED)


def _never_waits(world: World, rank: int) -> None:
    free_but_for_holds = [v for v in world.own[rank].seen() if slot_rules.may_overwrite(v, *world._view(rank))]
    assert not free_but_for_holds, "a slot is needed by a slow tier alone"


def _forget_by_number(world: World) -> None:
    """One rank fails more steps than are announced by name, while another, with both slots full, receives nothing."""
    world.save_whole(1, reported=True)
    world.save_whole(1, reported=True)
    for _ in range(2 * MAX_ABANDONED + 2):
        world.save_runs_out_of_time(0, reported=True)
    for message in world.to_coordinator:
        world._deliver(message)


def _forget_failures(world: World) -> None:
    """Both replicas of a rank are of steps that it never reported: it will never have them, and has forgotten that."""
    for _ in range(2):
        world.begin_save(0)
        world.finish_capture(0)
        world.find_a_slot_bad_after_it_was_sent(0, reported=False)
    world.kill_an_engine(0)


@pytest.mark.parametrize("flawed", [False, True])
def test_a_world_heals_of_more_abandoned_steps_than_have_names(monkeypatch: pytest.MonkeyPatch, flawed: bool) -> None:
    if flawed:
        monkeypatch.setattr(AbandonedSteps, "__contains__", lambda steps, step: step in steps.named)
    _heal(Healing(), _forget_by_number, flawed)


@pytest.mark.parametrize("flawed", [False, True])
def test_a_world_heals_at_once_of_failures_that_were_forgotten(monkeypatch: pytest.MonkeyPatch, flawed: bool) -> None:
    """Without reports of the step being saved this would need more failures than there are names."""
    if flawed:
        monkeypatch.setattr(Coordinator, "saving", lambda *_: False)
    world = HealingWithReplicas()
    world.rounds_to_heal = 4
    _heal(world, _forget_failures, flawed)


def _alone_have_a_step(world: World) -> None:
    """A rank began on another host, so it alone has a slot for a step while another rank's engine is away."""
    for _ in range(2):
        world.everyone_saves(received=True)
    world.own[2] = Slots(world.slots)
    for rank in range(world.ranks):
        world.begin_save(rank)
        world.finish_capture(rank)
    world.begin_save(2)
    world.finish_capture(2)
    for rank in range(2):
        world.begin_save(rank)
        world.save_runs_out_of_time(rank, reported=False)
    world.kill_an_engine(1)
    for rank in range(world.ranks):
        world.commit_and_replicate(rank)
    for message in world.to_coordinator:
        world._deliver(message)
    assert world.coordinator.world_step == 2


@pytest.mark.parametrize("flawed", [False, True])
def test_a_world_heals_of_a_step_that_one_rank_alone_has(monkeypatch: pytest.MonkeyPatch, flawed: bool) -> None:
    if flawed:
        monkeypatch.setattr(AbandonedSteps, "__contains__", lambda *_: False)
    _heal(HealingWithReplicas(), _alone_have_a_step, flawed)


def _skip_while_an_older_step_is_on_its_way(world: World) -> None:
    """All ranks have copied a step and are about to commit it; meanwhile each newer one finds no slot."""
    for rank in range(world.ranks):
        world.begin_save(rank)
        world.finish_capture(rank)
    for _ in range(MAX_ABANDONED + 1):
        for rank in range(world.ranks):
            world.save_runs_out_of_time(rank, reported=True)
    for message in world.to_coordinator:
        world._deliver(message)
    world.no_step_is_abandoned_that_nobody_gave_up()


def _abandon_past_what_is_open(coordinator: Coordinator, steps: Iterable[int]) -> None:
    """Steps without room for their names raise the number, whatever comes before them."""
    coordinator._abandoned.update(steps)
    coordinator._abandon_all_upto(max(sorted(coordinator._abandoned)[:-MAX_ABANDONED], default=-1))


def test_a_step_that_is_on_its_way_outlives_any_number_of_newer_ones_that_are_skipped() -> None:
    world = HealingWithReplicas()
    world.rounds_to_heal = 1
    _heal(world, _skip_while_an_older_step_is_on_its_way, flawed=False)


def test_the_model_finds_a_coordinator_that_gives_up_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_abandon", _abandon_past_what_is_open)
    with pytest.raises(AssertionError, match="on its way"):
        run_state_machine_as_test(Healing, settings=FLAWED)


def _heal(world: World, history: Callable[[World], None], flawed: bool) -> None:
    world.begin()
    history(world)
    with pytest.raises(AssertionError, match="for ever") if flawed else nullcontext():
        world.teardown()
