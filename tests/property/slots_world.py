"""A model of the world for the rule that allows slots to be overwritten. Ranks save at their own pace. Messages to and
from the coordinator are delayed, repeated, reordered or lost. Slow tiers hold slots for any time. Workers are killed
during a capture, engines with all they had not written down, and hosts are lost with everything on them. Generations
use fewer or more slots.

After every move the worst is assumed: if everything were killed now (with replicas: and any one host lost), every rank
must still have the newest world step, at least. Replicas of a step that a generation restored come later: until one of
its own steps is complete, a lost host may cost the restored step. With three slots an older one must then be there.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ckpt_engine.contracts.control_views import NOTHING_KEPT, AbandonedSteps, KeptStep
from ckpt_engine.contracts.generation import WorldView
from ckpt_engine.contracts.peer_wire import WorldStep
from ckpt_engine.rules import slot_rules
from ckpt_engine.rules.coordinator import Coordinator
from ckpt_engine.rules.slot_rules import MAX_SLOTS, MIN_SLOTS, SlotState, SlotView, choose_slot, unneeded_surplus
from flyball.contracts.checkpoints import Lineage, LineageEntry, branch, is_alive

_REMEMBERED_STEPS = 16  # as in the pipeline
WHOLE = (SlotState.CAPTURED, SlotState.COMMITTED)

Broadcast = tuple[WorldStep, tuple[int, ...]]  # with the last named step per slow tier (-1: none)


class Report(NamedTuple):
    rank: int
    saved: tuple[int, ...]
    failed: tuple[int, ...]
    saving: int  # the oldest step that is neither, else the position


class Slots:
    """A rank's own slots, or its replica slots on its neighbour, as in `RankSegments`."""

    def __init__(self, in_use: int = MIN_SLOTS) -> None:
        self.in_use = in_use
        self.views = [SlotView(index, SlotState.EMPTY, -1, -1, 0, 0) for index in range(MAX_SLOTS)]

    def seen(self) -> list[SlotView]:
        views = [replace(view, surplus=view.index >= self.in_use) for view in self.views]
        return [view for view in views if not view.surplus or view.state is not SlotState.EMPTY]

    def choose(
        self,
        world_step: int,
        lineage: Lineage,
        abandoned: Container[int],
        held: Collection[int] = (),
        kept: KeptStep = NOTHING_KEPT,
    ) -> SlotView | None:
        if self.in_use > MIN_SLOTS:
            held = {*held, *slot_rules.kept_steps(self.seen(), kept)}
        for view in unneeded_surplus(self.seen(), world_step, lineage, abandoned, held):
            self.views[view.index] = replace(view, state=SlotState.EMPTY, surplus=False)
        return choose_slot(self.seen(), world_step, lineage, abandoned, held)

    def put(self, index: int, state: SlotState, generation: int, step: int) -> None:
        sequence = self.views[index].sequence + (state is SlotState.WRITING)
        self.views[index] = SlotView(index, state, generation, step, 1, sequence)

    def restorable(self, lineage: Lineage) -> set[int]:
        """The steps that an engine can commit and serve after its trainer's death."""
        return {v.step for v in self.views if v.state in WHOLE and is_alive(v.generation, v.step, lineage)}

    def holds(self, generation: int, step: int) -> SlotView | None:
        return next((v for v in self.views if v.state in WHOLE and (v.generation, v.step) == (generation, step)), None)


class World(RuleBasedStateMachine):
    ranks = 2
    replicas = False
    slots = MIN_SLOTS
    slow_tiers = 0
    heals = False  # whether the walk ends with a period without faults
    rounds_to_heal = 30

    @initialize()
    def begin(self) -> None:
        self.own = [Slots(self.slots) for _ in range(self.ranks)]
        self.replica = [Slots() for _ in range(self.ranks)]  # of rank r, on the host of rank r + 1
        self.lineage: Lineage = (LineageEntry(1),)
        self.outlives_a_host = -1
        self._begin_generation(-1, [-1] * self.ranks)

    def _begin_generation(self, restored: int, known_before: list[int]) -> None:
        """`known_before`: by rank, the newest older step that its host knows all ranks and their peers to have."""
        self.generation = self.lineage[-1].generation
        self.unreplicated: set[int] = set()  # ranks whose restored shard is not with their keeper yet
        self.restored = restored
        self.next_step = [restored + 1] * self.ranks
        self.writing: list[int | None] = [None] * self.ranks
        self.saved: list[list[int]] = [[] for _ in range(self.ranks)]
        start = WorldStep("job", self.generation, restored, kept=known_before[0])
        self.coordinator = Coordinator(start, world_size=self.ranks)
        self.known = [
            WorldView(WorldStep("job", self.generation, restored, kept=step, kept_is_sure=rank == 0))
            for rank, step in enumerate(known_before)
        ]
        self.received = [[-1] * self.slow_tiers for _ in range(self.ranks)]
        self.named = [-1] * self.slow_tiers
        self.unanswered: list[set[int]] = [
            set() for _ in range(self.slow_tiers)
        ]  # ranks that have not settled the named step
        self.held = [[-1] * self.slow_tiers for _ in range(self.ranks)]
        self.failed: list[list[int]] = [[] for _ in range(self.ranks)]
        self.lost: list[set[int]] = [set() for _ in range(self.ranks)]  # `failed` without forgetting
        self.to_coordinator: list[Report] = []
        self.broadcasts: list[Broadcast] = [(start, tuple(self.named))]

    def _keeper(self, rank: int) -> int:
        return (rank + 1) % self.ranks

    # --- ranks and their engines ---

    @rule(rank=st.integers(0, 2))
    def begin_save(self, rank: int) -> None:
        rank %= self.ranks
        if self.writing[rank] is not None:
            return
        slot = self.own[rank].choose(*self._view(rank), self._held(rank), self.known[rank].present.kept_step)
        if slot is None:
            self._waits_for_the_world_only(rank)
        else:
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

    @rule(rank=st.integers(0, 2), reported=st.booleans())
    def save_runs_out_of_time(self, rank: int, reported: bool) -> None:
        rank %= self.ranks
        if self.writing[rank] is None:
            self._will_never_have(rank, self.next_step[rank])
            self.next_step[rank] += 1
            if reported:
                self._report(rank)

    @rule(rank=st.integers(0, 2))
    def pass_by(self, rank: int) -> None:
        """A script silently skips a step that the others save."""
        rank %= self.ranks
        if self.writing[rank] is None:
            self.lost[rank].add(self.next_step[rank])
            self.next_step[rank] += 1

    def _will_never_have(self, rank: int, step: int) -> None:
        self.failed[rank].append(step)
        self.lost[rank].add(step)

    def _report(self, rank: int) -> None:
        """All that the rank has, and all that it will never have: the next message repeats a lost one."""
        world_step, _, abandoned = self._view(rank)
        settled = (*self.saved[rank], *self.failed[rank])
        own = [v for v in self.own[rank].views if v.state is not SlotState.EMPTY and v.generation == self.generation]
        waiting = [v.step for v in own if v.step > world_step and v.step not in abandoned]
        busy = [step for step in waiting if step not in settled]
        newest = tuple(self.saved[rank][-_REMEMBERED_STEPS:]), tuple(self.failed[rank][-_REMEMBERED_STEPS:])
        self.to_coordinator.append(Report(rank, *newest, min(busy, default=self.next_step[rank])))

    @rule(rank=st.integers(0, 2))
    def commit_and_replicate(self, rank: int) -> None:
        """Commit and replicate the oldest captured shard; if the replica slot is busy, retry later."""
        rank %= self.ranks
        captured = [v for v in self.own[rank].views if v.state is SlotState.CAPTURED]
        self.replicate_what_was_restored(rank)
        if rank in self.unreplicated or not captured:  # newer steps wait for it
            return
        view = min(captured, key=lambda v: v.step)
        if self.replicas and not self._replicate(rank, view):
            return
        self.own[rank].views[view.index] = replace(view, state=SlotState.COMMITTED)
        self.saved[rank].append(view.step)
        self._report(rank)

    @rule(rank=st.integers(0, 2))
    def replicate_what_was_restored(self, rank: int) -> None:
        rank %= self.ranks
        if rank in self.unreplicated:
            views = (v for v in self.own[rank].views if v.state in WHOLE and v.step == self.restored)
            view = next((v for v in views if is_alive(v.generation, v.step, self.lineage)), None)
            if view is None or self._replicate(rank, view):
                self.unreplicated.discard(rank)

    def _replicate(self, rank: int, view: SlotView) -> bool:
        keeper, kept = self.known[self._keeper(rank)].present, set[int]()
        if view.step == self.restored:
            kept = slot_rules.kept_steps(self.replica[rank].seen(), keeper.kept_step)
        target = self.replica[rank].choose(*self._view(self._keeper(rank)), kept)
        if target is None:
            return False
        self.replica[rank].put(target.index, SlotState.COMMITTED, view.generation, view.step)
        return True

    def _view(self, rank: int) -> tuple[int, Lineage, AbandonedSteps]:
        known = self.known[rank].present
        return known.world_step, self.lineage, known.abandoned_steps

    def _held(self, rank: int) -> tuple[int, ...]:
        return tuple(step for step in self.held[rank] if step >= 0)

    def _waits_for_the_world_only(self, rank: int) -> None:
        """With a slot per slow tier, the other two would not be free without slow tiers either."""
        own = self.own[rank]
        if own.in_use < MIN_SLOTS + self.slow_tiers:
            return
        kept = slot_rules.kept_steps(own.seen(), self.known[rank].present.kept_step) if own.in_use > MIN_SLOTS else ()
        needed = [v for v in own.seen() if not v.surplus and not slot_rules.may_overwrite(v, *self._view(rank), kept)]
        assert len(needed) >= MIN_SLOTS, "a save waits for a slow tier"

    # --- slow tiers ---

    @precondition(lambda self: self.slow_tiers)
    @rule(tier=st.integers(0, 1))
    def name_for_a_slow_tier(self, tier: int) -> None:
        """The coordinator names its world step, unless a rank has not reported on the one before."""
        tier %= self.slow_tiers
        step = self.coordinator.world_step
        if not self.unanswered[tier] and step > self.named[tier]:  # also the restore step
            self.named[tier] = step
            self.unanswered[tier] = set(range(self.ranks))
            self._broadcast()

    @precondition(lambda self: self.slow_tiers)
    @rule(rank=st.integers(0, 2), tier=st.integers(0, 1))
    def slow_tier_is_done(self, rank: int, tier: int) -> None:
        """Written, or failed: report it to the coordinator."""
        rank, tier = rank % self.ranks, tier % self.slow_tiers
        if self.received[rank][tier] == self.named[tier]:
            self.held[rank][tier] = -1
            self.unanswered[tier].discard(rank)

    @rule(rank=st.integers(0, 2))
    def memory_runs_short(self, rank: int) -> None:
        self.own[rank % self.ranks].in_use = MIN_SLOTS
        if self.outlives_a_host < self.restored:  # with two slots, what is older goes
            self.outlives_a_host = -1

    # --- messages ---

    @precondition(lambda self: self.to_coordinator)
    @rule(data=st.data(), lost=st.booleans(), again=st.booleans())
    def deliver_to_coordinator(self, data: st.DataObject, lost: bool, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_coordinator) - 1))
        message = self.to_coordinator[index] if again else self.to_coordinator.pop(index)
        if not lost:
            self._deliver(message)

    def _deliver(self, message: Report) -> None:
        self.coordinator.saved(message.rank, message.saved)
        self.coordinator.failed(message.failed)
        if message.saving >= 0:
            self.coordinator.saving(message.rank, message.saving)
        self._broadcast()

    def _broadcast(self) -> None:
        self.broadcasts.append((self.coordinator.world, tuple(self.named)))

    @rule(rank=st.integers(0, 2), data=st.data())
    def receive_the_world(self, rank: int, data: st.DataObject) -> None:
        """Receive any broadcast of this generation, also an old one."""
        rank %= self.ranks
        self._receive(rank, data.draw(st.sampled_from(self.broadcasts)))

    def _receive(self, rank: int, broadcast: Broadcast) -> None:
        world, named = broadcast
        for tier, step in enumerate(named):  # held first, before the world step frees the slot
            if step > self.received[rank][tier] and step in self.own[rank].restorable(self.lineage):
                self.held[rank][tier] = step
            self.received[rank][tier] = max(step, self.received[rank][tier])
        self.known[rank].learn(world)

    # --- several moves at once, so that a walk makes progress ---

    @rule(rank=st.integers(0, 2), reported=st.booleans())
    def save_whole(self, rank: int, reported: bool) -> None:
        self.begin_save(rank)
        self.finish_capture(rank)
        self.commit_and_replicate(rank)
        for message in self.to_coordinator if reported else ():
            self._deliver(message)

    @rule(received=st.booleans())
    def everyone_saves(self, received: bool) -> None:
        for rank in range(self.ranks):
            self.save_whole(rank, reported=True)
        if received:
            self._broadcast()
            for rank in range(self.ranks):
                self._receive(rank, self.broadcasts[-1])

    # --- faults ---

    @rule(rank=st.integers(0, 2))
    def kill_an_engine(self, rank: int) -> None:
        """Restart an engine: it forgets failed steps, and saved steps that are not in its slots. The coordinator's
        engine knows its control words."""
        rank %= self.ranks
        self.failed[rank] = []
        self.saved[rank] = [step for step in self.saved[rank] if self.own[rank].holds(self.generation, step)]
        if rank == 0:
            self.coordinator = Coordinator(self.coordinator.world, world_size=self.ranks)

    @precondition(lambda self: self.replicas)
    @rule(rank=st.integers(0, 2), reported=st.booleans())
    def find_a_slot_bad_after_it_was_sent(self, rank: int, reported: bool) -> None:
        """The rank loses a step, perhaps unreported, of which a replica exists."""
        rank %= self.ranks
        for view in self.own[rank].views if rank not in self.unreplicated else ():
            if view.state is SlotState.CAPTURED and self._replicate(rank, view):
                self.own[rank].views[view.index] = replace(view, state=SlotState.EMPTY)
                self._will_never_have(rank, view.step)
                if reported:
                    self._report(rank)
                return

    @rule(slots=st.integers(MIN_SLOTS, MAX_SLOTS))
    def kill_all_workers(self, slots: int) -> None:
        self._restart(lost=None, slots=slots)

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

    def _restart(self, lost: int | None, slots: int | None = None) -> None:
        """What controller, daemons and engines do: stop, list the copies, name the step, fetch, resume."""
        common = self._common(lost)
        restored = max(common, default=None)
        sources = [self._source(rank, restored, lost) for rank in range(self.ranks)]
        slots = slots or self.slots
        known_before = [self._known_before(rank, restored, lost) for rank in range(self.ranks)]
        if self.coordinator.world_step > self.restored:
            self.outlives_a_host = self.coordinator.world_step
        if lost is not None or (slots == MIN_SLOTS and self.outlives_a_host != restored):
            self.outlives_a_host = -1
        for rank in range(self.ranks):
            for view in self.own[rank].views:
                if view.state is SlotState.CAPTURED:
                    self.own[rank].views[view.index] = replace(view, state=SlotState.COMMITTED)
            self.own[rank].in_use = slots
            if rank == lost:
                self.own[rank] = Slots(slots)
            if self._keeper(rank) == lost:
                self.replica[rank] = Slots()
        self.lineage = branch(self.lineage, restored_step=restored, generation=self.generation + 1)
        self._begin_generation(-1 if restored is None else restored, known_before)
        if restored is None:
            return
        for rank, generation in enumerate(sources):
            own, kept_step = self.own[rank], self.known[rank].present.kept_step
            if own.holds(generation, restored) is None:
                kept = slot_rules.kept_steps(own.seen(), kept_step)
                slot = own.choose(restored, self.lineage, (), kept) or own.choose(restored, self.lineage, ())
                assert slot is not None, "the shard that is to be restored finds no slot"
                own.put(slot.index, SlotState.COMMITTED, generation, restored)
            if self.replicas and self.replica[rank].holds(generation, restored) is None:
                self.unreplicated.add(rank)

    def _known_before(self, rank: int, restored: int | None, lost: int | None) -> int:
        """What the control words of the rank's host say."""
        if not self.replicas or rank == lost or restored is None:
            return -1
        words = self.coordinator.world if rank == 0 else self.known[rank].present
        found = words.kept if words.kept >= 0 else words.world_step
        return found if found < restored else -1

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

    # --- liveness ---

    def teardown(self) -> None:
        """Without faults from now on, the world step has to advance."""
        before = self.coordinator.world_step
        behind = max(self.next_step) - min(self.next_step)
        for _ in range(self.rounds_to_heal + behind if self.heals else 0):
            self._a_good_round()
            if self.coordinator.world_step > before:
                return
        assert not self.heals, f"the world step stays at {before} for ever: {[slots.seen() for slots in self.own]}"

    def _a_good_round(self) -> None:
        self._broadcast()
        for rank in range(self.ranks):
            self._receive(rank, self.broadcasts[-1])
            self.held[rank] = [-1] * self.slow_tiers
        for rank in sorted(range(self.ranks), key=lambda rank: self.next_step[rank]):
            if self.writing[rank] is None and self.next_step[rank] <= min(self.next_step):
                self.begin_save(rank)
                if self.writing[rank] is None:
                    self.save_runs_out_of_time(rank, reported=True)
            self.finish_capture(rank)
            self._settle_captured(rank)
            self._report(rank)
        for message in self.to_coordinator:
            self._deliver(message)
        self.to_coordinator.clear()

    def _settle_captured(self, rank: int) -> None:
        """As in the pipeline: abandoned steps are not replicated."""
        world_step, _, abandoned = self._view(rank)
        for view in self.own[rank].views:
            if view.state is SlotState.CAPTURED and (view.step < world_step or view.step in abandoned):
                self.own[rank].views[view.index] = replace(view, state=SlotState.COMMITTED)
        for _ in range(MAX_SLOTS):
            self.commit_and_replicate(rank)

    # --- safety ---

    @invariant()
    def the_world_step_is_there_for_all(self) -> None:
        world_step = self.coordinator.world_step
        if world_step < 0:
            return
        assert any(step >= world_step for step in self._common(lost=None)), "nothing common after a kill of all workers"
        needed = world_step if world_step > self.restored else self.outlives_a_host
        if self.replicas and needed >= 0:
            for lost in range(self.ranks):
                common = self._common(lost)
                assert any(step >= needed for step in common), f"nothing common after the loss of host {lost}"

    @invariant()
    def nobody_knows_more_than_is_true(self) -> None:
        assert all(known.present.world_step <= self.coordinator.world_step for known in self.known)

    @invariant()
    def no_step_is_abandoned_that_nobody_gave_up(self) -> None:
        """Steps that some rank holds count: all ranks have passed them, or will."""
        at = self.coordinator
        reported = AbandonedSteps(frozenset(at.abandoned), at.world_step, at.abandoned_upto)
        for step in {view.step for own in self.own for view in own.views if view.generation == self.generation}:
            if step > at.world_step and all(self._may_have(rank, step) for rank in range(self.ranks)):
                assert step not in reported, f"step {step} is on its way and was given up"

    def _may_have(self, rank: int, step: int) -> bool:
        there = self.own[rank].holds(self.generation, step) is not None
        return step >= self.next_step[rank] or (there and step not in self.lost[rank])

    @invariant()
    def what_a_slow_tier_writes_from_stays(self) -> None:
        for rank in range(self.ranks):
            for step in self._held(rank):
                assert step in self.own[rank].restorable(self.lineage), (
                    "a slot was overwritten while a slow tier wrote it"
                )
