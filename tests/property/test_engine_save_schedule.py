"""Steps for an interval in seconds, with late and lost names, skewed ranks and kills of the coordinator: there is
always a common step, and always another save."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.contracts.generation import WorldView
from ckpt_engine.contracts.peer_wire import WorldStep
from ckpt_engine.rules.coordinator import Coordinator
from ckpt_engine.rules.save_schedule import SaveSchedule, interval_s, is_due
from ckpt_engine.rules.slot_rules import SlotState, SlotView, choose_slot
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry

RANKS, SKEW_STEPS, TICK_S = 3, 3, 0.25
LINEAGE = (LineageEntry(1),)


class Rank:
    """A trainer with two slots, and what its engine has received."""

    def __init__(self) -> None:
        self.position = -1
        self.slots = [SlotView(index, SlotState.EMPTY, -1, -1, 0, 0) for index in range(2)]
        self.saved: set[int] = set()
        self.failed: set[int] = set()
        self.world = WorldView(WorldStep("job", 1, -1))

    @property
    def steps(self) -> set[int]:
        return {slot.step for slot in self.slots if slot.state is SlotState.COMMITTED}

    def advance(self, spec: CheckpointSpec, stride: int) -> None:
        self.position += 1
        world = self.world.present
        if self.position % stride or not is_due(spec, self.position, world.next_save):
            return
        slot = choose_slot(self.slots, world.world_step, LINEAGE, world.abandoned_steps)
        if slot is None:
            self.failed.add(self.position)
            return
        self.slots[slot.index] = SlotView(slot.index, SlotState.COMMITTED, 1, self.position, 1, slot.sequence + 1)
        self.saved.add(self.position)

    def look(self, spec: CheckpointSpec) -> None:
        """What the save clock reports."""
        named = self.world.present.next_save
        if self.world.present.world_step < named < self.position and not is_due(spec, named) | (named in self.saved):
            self.failed.add(named)


class World:
    def __init__(self, spec: CheckpointSpec, stride: int = 1) -> None:
        self.spec, self.stride = spec, stride
        self.ranks = [Rank() for _ in range(RANKS)]
        self.now_s = 0.0
        self.named: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Restart rank 0's engine: it knows its control words."""
        known = self.ranks[0].world.present
        saves = SaveSchedule(
            interval_s(self.spec), named=known.next_save, world_step=known.world_step, now_s=self.now_s
        )
        self.coordinator = Coordinator(known, world_size=RANKS, saves=saves)

    def receive(self, rank: Rank) -> None:
        rank.world.learn(self.coordinator.world)

    def do(self, event: str, rank: Rank) -> None:
        match event:
            case "advance":
                if rank.position < min(other.position for other in self.ranks) + SKEW_STEPS:
                    rank.advance(self.spec, self.stride)
            case "look":
                rank.look(self.spec)
            case "receive":
                self.receive(rank)
            case "report":
                self.coordinator.saved(self.ranks.index(rank), sorted(rank.saved)[-16:])
                self.coordinator.failed(sorted(rank.failed)[-16:])
            case "tick":
                self.now_s += TICK_S
                self.coordinator.now_s = self.now_s
                position = self.ranks[0].position
                self.coordinator.tick(position - position % self.stride)
                self.receive(self.ranks[0])
            case "restart":
                self.restart()
        self.named.add(self.coordinator.next_save)
        self.check()

    def check(self) -> None:
        common = set.intersection(*(rank.steps for rank in self.ranks))
        assert self.coordinator.world_step <= max(common, default=-1)

    def run_well(self, rounds: int, *, steps: int = 1, delay: int = 0) -> None:
        """`delay`: ticks until the other ranks receive the name."""
        for round_ in range(rounds):
            for event in ("tick", *["advance"] * steps, "look", "report", "receive"):
                for rank in self.ranks if event != "tick" else self.ranks[:1]:
                    if event != "receive" or rank is self.ranks[0] or round_ % (delay + 1) == delay:
                        self.do(event, rank)


EVENTS = st.tuples(
    st.sampled_from(["advance"] * 4 + ["look", "receive", "receive", "report", "report", "tick", "tick", "restart"]),
    st.integers(0, RANKS - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(EVENTS, max_size=150),
    st.sampled_from([CheckpointSpec(every_steps=0, every_s=1.0), CheckpointSpec(every_steps=7, every_s=1.0)]),
)
def test_there_is_always_a_common_step_and_always_another_save(
    history: list[tuple[str, int]], spec: CheckpointSpec
) -> None:
    world = World(spec)
    for event, rank in history:
        world.do(event, world.ranks[rank])
    for _ in range(3):
        before = world.coordinator.world_step
        world.run_well(50)
        assert world.coordinator.world_step > before


def test_a_late_name_makes_the_next_one_earlier_until_all_are_in_time() -> None:
    world = World(CheckpointSpec(every_steps=0, every_s=1.0))
    world.run_well(400, steps=4, delay=7)
    failed = set.union(*(rank.failed for rank in world.ranks))
    assert failed  # the first names came too late
    named = len(world.named)
    world.run_well(400, steps=4, delay=7)
    late = set.union(*(rank.failed for rank in world.ranks)) - failed
    assert len(late) <= (len(world.named) - named) / 4
    assert world.coordinator.world_step > 3000 - 4 * 8 / TICK_S


def test_a_script_that_calls_save_on_some_steps_only_is_named_those() -> None:
    world = World(CheckpointSpec(every_steps=0, every_s=2.0), stride=10)
    world.run_well(200, steps=3)
    assert world.coordinator.world_step > 400
    assert not any(rank.failed for rank in world.ranks)


def test_steps_that_are_due_anyway_are_an_interval_kept() -> None:
    world = World(CheckpointSpec(every_steps=2, every_s=1.0))
    world.run_well(100)
    assert {step for step in world.named if step >= 0} == set()
    assert world.coordinator.world_step >= 96


def test_the_interval_is_the_shortest_of_the_tiers_that_are_on() -> None:
    spec = CheckpointSpec(every_s=30.0, disk_every_s=10.0, persistent_dir="/p", persistent_every_s=20.0)
    assert interval_s(spec) == 20.0
    assert interval_s(CheckpointSpec()) == 0.0
