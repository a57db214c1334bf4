"""Two slots per rank, one rule for overwriting them: no history of saves, failures, delays, kills and lost hosts ends
without a common restorable step.

The model is the world as the rule sees it: ranks that save at their own pace, messages to and from the coordinator that
arrive late, twice, in another order or never, workers killed in the middle of a capture, and hosts lost with all that
they held. After every move the worst is assumed: if everything were killed now (with replicas: and any one host lost),
the newest world step, at least, must be there for every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt_engine import slot_rules
from ckpt_engine.coordinator import Coordinator
from ckpt_engine.slot_rules import SlotState, SlotView, choose_slot
from flyball.contracts.checkpoints import Lineage, LineageEntry, branch, is_alive

WHOLE = (SlotState.CAPTURED, SlotState.COMMITTED)
Rule = Callable[[SlotView, int, Lineage, object], bool]


class Slots:
    """Two slots, as a rank's own or as the replica of one on its neighbour."""

    def __init__(self) -> None:
        self.views = [SlotView(index, SlotState.EMPTY, -1, -1, 0, 0) for index in range(2)]

    def put(self, index: int, state: SlotState, generation: int, step: int) -> None:
        sequence = self.views[index].sequence + (state is SlotState.WRITING)
        self.views[index] = SlotView(index, state, generation, step, 1, sequence)

    def restorable(self, lineage: Lineage) -> set[int]:
        """What an engine can commit and serve after its trainer's death."""
        return {v.step for v in self.views if v.state in WHOLE and is_alive(v.generation, v.step, lineage)}

    def holds(self, generation: int, step: int) -> SlotView | None:
        return next((v for v in self.views if v.state in WHOLE and (v.generation, v.step) == (generation, step)), None)


class World(RuleBasedStateMachine):
    ranks = 2
    replicas = False

    @initialize()
    def begin(self) -> None:
        self.own = [Slots() for _ in range(self.ranks)]
        self.replica = [Slots() for _ in range(self.ranks)]  # of rank r, kept by the host of rank r + 1
        self.lineage: Lineage = (LineageEntry(1),)
        self._begin_generation(-1)

    def _begin_generation(self, restored: int) -> None:
        self.generation = self.lineage[-1].generation
        self.restored = restored
        self.coordinator = Coordinator(generation=self.generation, world_size=self.ranks, world_step=restored)
        self.next_step = [restored + 1] * self.ranks
        self.writing: list[int | None] = [None] * self.ranks
        self.saved: list[list[int]] = [[] for _ in range(self.ranks)]
        self.known = [(restored, ())] * self.ranks  # what each rank's host heard of the world
        self.to_coordinator: list[tuple[int, tuple[int, ...], int | None]] = []  # rank, saved steps, failed step
        self.broadcasts: list[tuple[int, tuple[int, ...]]] = [(restored, ())]

    def _keeper(self, rank: int) -> int:
        return (rank + 1) % self.ranks

    # --- what a rank and its engine do ---

    @rule(rank=st.integers(0, 2))
    def begin_save(self, rank: int) -> None:
        rank %= self.ranks
        if self.writing[rank] is not None:
            return
        slot = choose_slot(self.own[rank].views, *self._view(rank))
        if slot is not None:
            self.own[rank].put(slot.index, SlotState.WRITING, self.generation, self.next_step[rank])
            self.writing[rank] = slot.index

    @rule(rank=st.integers(0, 2))
    def finish_capture(self, rank: int) -> None:
        rank %= self.ranks
        index = self.writing[rank]
        if index is not None:
            self.own[rank].put(index, SlotState.CAPTURED, self.generation, self.next_step[rank])
            self.writing[rank] = None
            self.next_step[rank] += 1

    @rule(rank=st.integers(0, 2), told=st.booleans())
    def save_runs_out_of_time(self, rank: int, told: bool) -> None:
        rank %= self.ranks
        if self.writing[rank] is None:
            if told:
                self.to_coordinator.append((rank, (), self.next_step[rank]))
            self.next_step[rank] += 1

    @rule(rank=st.integers(0, 2))
    def commit_and_replicate(self, rank: int) -> None:
        """The oldest captured shard; a busy replica slot means trying again later."""
        rank %= self.ranks
        captured = [v for v in self.own[rank].views if v.state is SlotState.CAPTURED]
        if not captured:
            return
        view = min(captured, key=lambda v: v.step)
        if self.replicas and not self._replicate(rank, view):
            return
        self.own[rank].views[view.index] = replace(view, state=SlotState.COMMITTED)
        self.saved[rank].append(view.step)
        self.to_coordinator.append((rank, tuple(self.saved[rank]), None))

    def _replicate(self, rank: int, view: SlotView) -> bool:
        target = choose_slot(self.replica[rank].views, *self._view(self._keeper(rank)))
        if target is None:
            return False
        self.replica[rank].put(target.index, SlotState.COMMITTED, view.generation, view.step)
        return True

    def _view(self, rank: int) -> tuple[int, Lineage, tuple[int, ...]]:
        world_step, abandoned = self.known[rank]
        return world_step, self.lineage, abandoned

    # --- messages ---

    @precondition(lambda self: self.to_coordinator)
    @rule(data=st.data(), lost=st.booleans(), again=st.booleans())
    def deliver_to_coordinator(self, data: st.DataObject, lost: bool, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_coordinator) - 1))
        said = self.to_coordinator[index] if again else self.to_coordinator.pop(index)
        if not lost:
            self._tell(said)

    def _tell(self, said: tuple[int, tuple[int, ...], int | None]) -> None:
        rank, saved, failed = said
        self.coordinator.saved(rank, saved)
        if failed is not None:
            self.coordinator.failed((failed,))
        self.broadcasts.append((self.coordinator.world_step, self.coordinator.abandoned))

    @rule(rank=st.integers(0, 2), data=st.data())
    def hear_of_the_world(self, rank: int, data: st.DataObject) -> None:
        """Any broadcast of this generation, also an old one: those that go back are ignored, as the engines do."""
        rank %= self.ranks
        world_step, abandoned = data.draw(st.sampled_from(self.broadcasts))
        if world_step >= self.known[rank][0]:
            self.known[rank] = (world_step, abandoned)

    # --- several moves at once, so that a walk gets far ---

    @rule(rank=st.integers(0, 2), told=st.booleans())
    def save_whole(self, rank: int, told: bool) -> None:
        self.begin_save(rank)
        self.finish_capture(rank)
        self.commit_and_replicate(rank)
        for said in self.to_coordinator if told else ():
            self._tell(said)

    @rule(heard=st.booleans())
    def everyone_saves(self, heard: bool) -> None:
        for rank in range(self.ranks):
            self.save_whole(rank, told=True)
        if heard:
            self.known = [(self.coordinator.world_step, self.coordinator.abandoned)] * self.ranks

    # --- what goes wrong ---

    @rule()
    def kill_all_workers(self) -> None:
        self._restart(lost=None)

    @precondition(lambda self: self.replicas)
    @rule(rank=st.integers(0, 2))
    def lose_a_host(self, rank: int) -> None:
        self._restart(lost=rank % self.ranks)

    def _available(self, rank: int, lost: int | None) -> set[int]:
        own = set() if rank == lost else self.own[rank].restorable(self.lineage)
        kept = set() if not self.replicas or self._keeper(rank) == lost else self.replica[rank].restorable(self.lineage)
        return own | kept

    def _common(self, lost: int | None) -> set[int]:
        return set.intersection(*(self._available(rank, lost) for rank in range(self.ranks)))

    def _restart(self, lost: int | None) -> None:
        """What the controller, the daemons and the engines do: stop, ask what is there, name the step, fetch, go on."""
        common = self._common(lost)
        restored = max(common, default=None)
        sources = [self._source(rank, restored, lost) for rank in range(self.ranks)]
        for rank in range(self.ranks):
            for view in self.own[rank].views:
                if view.state is SlotState.CAPTURED:
                    self.own[rank].views[view.index] = replace(view, state=SlotState.COMMITTED)
            if rank == lost:
                self.own[rank] = Slots()
            if self._keeper(rank) == lost:
                self.replica[rank] = Slots()
        self.lineage = branch(self.lineage, restored_step=restored, generation=self.generation + 1)
        self._begin_generation(-1 if restored is None else restored)
        if restored is None:
            return
        for rank, generation in enumerate(sources):
            for slots in (self.own[rank], self.replica[rank]) if self.replicas else (self.own[rank],):
                if slots.holds(generation, restored) is None:
                    slot = choose_slot(slots.views, restored, self.lineage, ())
                    assert slot is not None, "the shard that is to be restored finds no slot"
                    slots.put(slot.index, SlotState.COMMITTED, generation, restored)

    def _source(self, rank: int, step: int | None, lost: int | None) -> int:
        """The generation that wrote the rank's shard of the restore step."""
        held = [] if rank == lost else self.own[rank].views
        kept = [] if self._keeper(rank) == lost or not self.replicas else self.replica[rank].views
        return next(
            (
                v.generation
                for v in (*held, *kept)
                if v.step == step and v.state in WHOLE and is_alive(v.generation, v.step, self.lineage)
            ),
            -1,
        )

    # --- what must never be ---

    @invariant()
    def the_world_step_is_there_for_all(self) -> None:
        world_step = self.coordinator.world_step
        if world_step < 0:
            return
        assert any(step >= world_step for step in self._common(lost=None)), "nothing common after a kill of all workers"
        if self.replicas:
            for lost in range(self.ranks):
                common = self._common(lost)
                assert any(step >= world_step for step in common), f"nothing common after the loss of host {lost}"

    @invariant()
    def nobody_knows_more_than_is_true(self) -> None:
        assert all(world_step <= self.coordinator.world_step for world_step, _ in self.known)


class ThreeRanks(World):
    ranks = 3


class WithReplicas(World):
    replicas = True


class ThreeRanksWithReplicas(World):
    ranks = 3
    replicas = True


MODEL = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("world", [World, ThreeRanks, WithReplicas, ThreeRanksWithReplicas])
def test_no_history_ends_without_a_common_restorable_step(world: type[World]) -> None:
    run_state_machine_as_test(world, settings=MODEL)


def _also_the_world_step(slot: SlotView, world_step: int, lineage: Lineage, abandoned: object) -> bool:
    return slot.state is SlotState.COMMITTED and slot.step <= world_step


def _also_the_older_of_two(slot: SlotView, world_step: int, lineage: Lineage, abandoned: object) -> bool:
    return slot.state is SlotState.COMMITTED  # what "the rank picks alone" comes to


@pytest.mark.parametrize("weaker", [_also_the_world_step, _also_the_older_of_two])
def test_the_model_finds_the_flaw_of_a_weaker_rule(monkeypatch: pytest.MonkeyPatch, weaker: Rule) -> None:
    right = slot_rules.may_overwrite
    monkeypatch.setattr(slot_rules, "may_overwrite", lambda *case: right(*case) or weaker(*case[:4]))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ThreeRanks, settings=settings(MODEL, print_blob=False))
