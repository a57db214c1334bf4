"""The common steps of the disks, with slow and full disks, lost messages, and kills of any engine: once a step is on
all disks, there is always a common step, and it never gets older."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt_engine.contracts.generation import WorldView
from ckpt_engine.contracts.peer_wire import TierNaming, TierReport, WorldStep
from ckpt_engine.rules.coordinator import Coordinator
from ckpt_engine.rules.retention_rules import removable, reported_steps
from ckpt_engine.rules.tier_schedule import StepMarks, TierSchedule
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier, TierPolicy

RANKS, KEPT, EVERY = 3, 2, 2


def copy_of(rank: int, step: int, generation: int = 1) -> ShardCopy:
    return ShardCopy("job", generation, step, rank, Tier.DISK, f"host{rank}", 1, "")


BY_STEPS = TierPolicy(EVERY, keep_latest=KEPT)
BY_SECONDS = TierPolicy(every_s=5.0, keep_latest=KEPT)
ON_DEMAND = TierPolicy(every_steps=1_000_000, keep_latest=KEPT)


class Rank:
    """A rank's slots and disk, and the engine beside them, which can be killed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.disk: set[int] = set()
        self.slots: set[int] = set()
        self.saved: set[int] = set()
        self.begin(-1)

    def begin(self, world_step: int) -> None:
        self.world = WorldView(WorldStep("job", 1, world_step))
        self.received = self.settled = -1

    @property
    def naming(self) -> TierNaming:
        return next(iter(self.world.present.tiers), TierNaming(Tier.DISK, -1))

    @property
    def report(self) -> TierReport:
        return TierReport(Tier.DISK, self.received, self.settled, tuple(sorted(self.disk)))

    def receive(self, world: WorldStep) -> None:
        self.world.learn(world)
        self.received = max(self.received, self.naming.step)

    def save(self, step: int) -> None:
        """Two slots: one that is older than the world step, and not being written, is reused."""
        if len(self.slots) == 2:
            held = {self.received} if self.settled < self.received else set()
            free = [s for s in self.slots if s < self.world.present.world_step and s not in held]
            if not free:
                return
            self.slots.remove(min(free))
        self.slots.add(step)
        self.saved.add(step)

    def write(self, *, works: bool) -> None:
        if self.settled < self.received:
            if works and self.received in self.slots:
                self.disk.add(self.received)
            self.settled = self.received

    def prune(self) -> None:
        copies = [copy_of(self.number, step) for step in self.disk]
        gone = removable(copies, naming=self.naming, lineage=(LineageEntry(1),), ranks=None)
        self.disk -= {copy.step for copy in gone}


class World:
    def __init__(self, policy: TierPolicy = BY_STEPS) -> None:
        self.policy = policy
        self.ranks = [Rank(number) for number in range(RANKS)]
        self.step = 0
        self.now_s = 0.0
        self.best = -1
        self.clean: int | None = None  # the newest step that is not suspect
        self.restart()

    def restart(self) -> None:
        """Restart rank 0's engine."""
        schedule = TierSchedule(
            Tier.DISK,
            policy=self.policy,
            world_size=RANKS,
            restore_step=-1,
            now_s=self.now_s,
            marks=StepMarks(clean_step=lambda: self.clean),
        )
        known = self.ranks[0].world.present.world_step
        self.coordinator = Coordinator(WorldStep("job", 1, known), world_size=RANKS, schedules=[schedule])

    @property
    def message(self) -> WorldStep:
        at = self.coordinator
        return WorldStep("job", 1, at.world_step, at.abandoned, at.namings)

    def do(self, event: str, rank: Rank) -> None:
        self.now_s += 0.1
        self.coordinator.now_s = self.now_s
        match event:
            case "flush":
                self.coordinator.flush_wanted(rank.world.present.world_step)
            case "tick":
                self.coordinator.tick(-1)
            case "train":
                if all(self.step in other.saved for other in self.ranks):
                    self.step += 1
                for other in self.ranks:
                    if self.step not in other.saved:
                        other.save(self.step)
            case "report":
                self.coordinator.tiers_reported(rank.number, [rank.report])
                self.coordinator.saved(rank.number, sorted(rank.saved)[-4:])
            case "receive":
                rank.receive(self.message)
            case "write" | "fail":
                rank.write(works=event == "write")
            case "prune":
                rank.prune()
            case "kill":
                rank.begin(rank.world.present.world_step)
                if rank.number == 0:
                    self.restart()
        self.check()

    def check(self) -> None:
        common = set.intersection(*(rank.disk for rank in self.ranks))
        assert max(common, default=-1) >= self.best
        self.best = max(common, default=-1)

    def run_well(self, rounds: int) -> None:
        for _ in range(rounds):
            for event in ("train", "report", "receive", "write", "report", "receive", "prune"):
                for rank in self.ranks if event != "train" else self.ranks[:1]:
                    self.do(event, rank)


EVENTS = st.tuples(
    st.sampled_from(
        [
            "tick",
            "flush",
            "train",
            "report",
            "report",
            "receive",
            "receive",
            "write",
            "write",
            "fail",
            "prune",
            "prune",
            "kill",
        ]
    ),
    st.integers(0, RANKS - 1),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=120), st.sampled_from([BY_STEPS, BY_SECONDS, ON_DEMAND]))
def test_the_newest_step_that_all_disks_have_is_never_lost_and_there_are_always_more(
    history: list[tuple[str, int]], policy: TierPolicy
) -> None:
    world = World(policy)
    for event, rank in history:
        world.do(event, world.ranks[rank])
    before = world.best
    world.run_well(4)
    world.do("flush", world.ranks[0])
    world.run_well(4)
    assert world.best > before
    assert all(len(rank.disk) <= KEPT + 1 for rank in world.ranks)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.lists(EVENTS, max_size=60), st.sampled_from([BY_STEPS, BY_SECONDS, ON_DEMAND]))
def test_a_clean_step_that_only_memory_has_is_written_while_newer_ones_are_suspect_and_then_stays(
    before: list[tuple[str, int]], after: list[tuple[str, int]], policy: TierPolicy
) -> None:
    """Training goes on all the time, and the engines may be killed again and again."""
    world = World(policy)
    world.run_well(2)
    for event, rank in before:
        world.do(event, world.ranks[rank])
    world.clean = clean = world.coordinator.world_step
    for event in ("report", "tick", "receive", "write") * 4:  # within one step of the training
        for rank in world.ranks:
            world.do(event, rank)
    common = set.intersection(*(rank.disk for rank in world.ranks))
    assume(clean in world.ranks[0].slots or clean in common)  # no rank had to give it up for a write that failed
    assert clean in common or clean <= world.coordinator.schedules[0].named
    kept = max((step for step in common if step <= clean), default=-1)
    for event, rank in after:
        world.do(event, world.ranks[rank])
    world.run_well(6)
    assert all(kept in rank.disk for rank in world.ranks) or kept < 0
    assert world.coordinator.world_step > clean  # nobody waits for anybody


@pytest.mark.parametrize("keep_every", [0, 2, 5])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_clean_step_stays_however_many_multiples_follow_it(keep_every: int, restarts: bool) -> None:
    clean, suspect_from, ends = 53, 60, 400
    policy = TierPolicy(1, keep_latest=8, keep_every=keep_every)
    disk: set[int] = set()
    known = True  # to the coordinator, whether steps are suspect

    def start() -> TierSchedule:
        return TierSchedule(
            Tier.DISK,
            policy=policy,
            world_size=1,
            restore_step=-1,
            marks=StepMarks(
                clean_step=lambda: clean if known and max(disk) >= suspect_from else None, is_known=lambda: known
            ),
        )

    schedule = start()
    for step in range(1, ends):
        disk.add(step)
        if restarts and step % 90 == 0:  # the supervisor is heard a few steps later
            schedule, known = start(), False
        elif step % 90 == 5:
            known = True
        schedule.offer([step], 0.0)
        schedule.report(0, TierReport(Tier.DISK, step, step, reported_steps(sorted(disk), policy)))
        naming = schedule.naming
        assert naming is not None
        copies = [copy_of(0, held) for held in disk]
        gone = removable(copies, naming=naming, lineage=(LineageEntry(1),), ranks=None, keep_every=keep_every)
        disk -= {copy.step for copy in gone}
        assert step < clean or clean in disk
    others = [step for step in disk if not keep_every or step % keep_every]
    assert len(others) <= policy.keep_latest + 1


def test_a_disk_slower_than_a_step_makes_all_ranks_skip_the_same_steps() -> None:
    world = World()
    for round_ in range(60):
        world.do("train", world.ranks[0])
        for event in ("report", "receive", "report", "receive", "prune"):
            for rank in world.ranks:
                world.do(event, rank)
        if round_ % 7 == 0:
            world.do("write", world.ranks[round_ % RANKS])
    disks = [rank.disk for rank in world.ranks]
    assert world.best >= 0
    assert all(max(disk) - world.best <= 40 for disk in disks)
    assert len(set.intersection(*disks)) >= 2


def test_a_due_step_that_finds_the_tier_busy_is_owed_and_the_next_one_is_taken_in_its_place() -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(10, keep_latest=1), world_size=1, restore_step=-1)
    schedule.report(0, TierReport(Tier.DISK, -1, -1))
    named = []
    for step in range(52):
        schedule.offer([step], 0.0)
        named.append(schedule.named)
        busy = schedule.named == 10 and step < 23
        schedule.report(0, TierReport(Tier.DISK, schedule.named, 0 if busy else schedule.named))
    assert sorted(set(named)) == [0, 10, 24, 30, 40, 50]
    schedule.offer([60, 61], 0.0)  # complete at once: the multiple itself, while it is available
    assert schedule.named == 60


@pytest.mark.parametrize(("first", "named"), [(0, 1), (1, 10), (7, 10), (10, 11)])
def test_only_a_step_that_was_saved_is_owed(first: int, named: int) -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(10, keep_latest=1), world_size=1, restore_step=-1)
    schedule.offer([first], 0.0)  # before the first scan
    schedule.report(0, TierReport(Tier.DISK, -1, -1))
    for step in range(first + 1, 12):
        if schedule.named < 0:
            schedule.offer([step], 0.0)
    assert schedule.named == named


def test_a_coordinator_that_is_started_again_knows_that_a_step_is_owed() -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(10, keep_latest=1), world_size=1, restore_step=7)
    schedule.report(0, TierReport(Tier.DISK, 12, 12, (12,)))
    schedule.offer([19], 0.0)
    assert schedule.named == 12
    schedule.offer([21], 0.0)
    assert schedule.named == 21


def test_the_last_due_step_of_a_job_reaches_the_disk_or_a_newer_one_does() -> None:
    world = World()
    for round_ in range(30):
        for event in ("train", "report", "receive") + (("write",) if round_ % 7 == 0 else ()):
            for rank in world.ranks if event != "train" else world.ranks[:1]:
                world.do(event, rank)
    last_due = max(step for step in world.ranks[0].saved if step % EVERY == 0)
    for event in ("write", "report", "receive") * 3:  # training is over
        for rank in world.ranks:
            world.do(event, rank)
    assert world.best >= last_due


def test_a_world_that_runs_well_writes_every_due_step() -> None:
    world = World()
    written = []
    for _ in range(20):
        world.run_well(1)
        written.append(world.best)
    assert set(written) == set(range(0, 20, EVERY)) | {max(written)}


def test_an_interval_in_seconds_is_kept_and_a_demand_is_met_between() -> None:
    world = World(BY_SECONDS)
    written: dict[int, float] = {}
    for round_ in range(60):
        world.run_well(1)
        written.setdefault(world.best, world.now_s)
        if round_ == 29:
            world.do("flush", world.ranks[1])
            asked_s = world.now_s
    times = sorted(written.values())[1:]  # without a nonexistent step
    assert any(0 < at_s - asked_s < 5.0 for at_s in times)
    assert all(later - earlier <= 5.0 + 4.0 for earlier, later in itertools.pairwise(times))
    assert len(times) <= world.now_s / 5.0 + 1


def test_the_step_that_a_generation_began_with_is_written_if_it_is_wanted_and_not_by_itself() -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(1), world_size=1, restore_step=7)
    schedule.report(0, TierReport(Tier.DISK, 6, 6))
    schedule.offer([7], 0.0)
    assert schedule.naming == TierNaming(Tier.DISK, 6, ())
    schedule.demand(7)
    schedule.offer([7], 0.0)
    assert schedule.naming == TierNaming(Tier.DISK, 7, ())


def test_nothing_is_named_and_nothing_removed_before_every_rank_has_reported_what_it_holds() -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(1, keep_latest=1), world_size=2, restore_step=-1)
    schedule.report(0, TierReport(Tier.DISK, 7, 7, (5, 7)))
    schedule.offer([8], 0.0)
    assert schedule.naming is None
    schedule.report(1, TierReport(Tier.DISK, -1, -1, (5,)))
    assert schedule.naming == TierNaming(Tier.DISK, 7, (5,))
    schedule.offer([8], 0.0)
    assert schedule.naming == TierNaming(Tier.DISK, 7, (5,))  # rank 1 has not reported on 7
    schedule.report(1, TierReport(Tier.DISK, 7, 7, (5,)))
    schedule.offer([8], 0.0)
    assert schedule.naming == TierNaming(Tier.DISK, 8, (5,))


def test_a_step_that_cannot_be_read_is_neither_removed_nor_counted() -> None:
    schedule = TierSchedule(Tier.DISK, policy=TierPolicy(1, keep_latest=1), world_size=2, restore_step=-1)
    schedule.report(0, TierReport(Tier.DISK, 30, 30, (10, 20, 30)))
    schedule.report(1, TierReport(Tier.DISK, 30, 30, (10, 20), (30,)))
    assert schedule.naming == TierNaming(Tier.DISK, 30, (20, 30))
    schedule.report(1, TierReport(Tier.DISK, 30, 30, (10, 20)))  # read, and bad
    assert schedule.naming == TierNaming(Tier.DISK, 30, (20,))
    schedule.report(1, TierReport(Tier.DISK, 30, 30, (10, 20, 30)))  # read, and good
    assert schedule.naming == TierNaming(Tier.DISK, 30, (30,))


def test_a_step_whose_world_manifest_cannot_be_read_is_neither_removed_nor_counted_nor_sealed_again() -> None:
    tier = Tier.PERSISTENT
    schedule = TierSchedule(tier, policy=TierPolicy(1, keep_latest=1), world_size=1, restore_step=-1, sealed=True)
    schedule.report(0, TierReport(tier, 30, 30, (10, 20, 30)))
    schedule.seal_report(TierReport(tier, 30, 30, (10, 20), (30,)))
    assert schedule.naming == TierNaming(tier, 30, (20, 30))
    assert schedule.to_seal is None
    schedule.report(0, TierReport(tier, 31, 31, (10, 20, 30), (31,)))  # the sealer checks for itself
    assert schedule.to_seal == 31


def test_a_step_is_sealed_when_all_have_written_it_and_counts_when_it_is_sealed() -> None:
    tier = Tier.PERSISTENT
    schedule = TierSchedule(tier, policy=TierPolicy(1, keep_latest=1), world_size=2, restore_step=-1, sealed=True)
    schedule.seal_report(TierReport(tier, -1, -1))
    for rank in (0, 1):
        schedule.report(rank, TierReport(tier, -1, -1))
    schedule.offer([1], 0.0)
    schedule.report(0, TierReport(tier, 1, 1, (1,)))
    assert schedule.to_seal is None
    schedule.report(1, TierReport(tier, 1, 1, (1,)))
    assert schedule.to_seal == 1
    schedule.offer([2], 0.0)
    assert schedule.naming == TierNaming(tier, 1, ())
    schedule.seal_report(TierReport(tier, 1, 1, (1,)))
    assert schedule.to_seal is None
    schedule.offer([2], 0.0)
    assert schedule.naming == TierNaming(tier, 2, (1,))


def test_what_a_newer_generation_wrote_is_not_removed_by_a_host_that_was_cut_off() -> None:
    copies = [copy_of(0, step, generation) for generation, step in ((1, 3), (1, 4), (2, 9), (2, 11), (3, 5))]
    gone = removable(
        copies,
        naming=TierNaming(Tier.PERSISTENT, 11, (11,)),
        lineage=(LineageEntry(1, 3), LineageEntry(2)),
        ranks=(0,),
    )
    assert [(copy.generation, copy.step) for copy in gone] == [(1, 3), (1, 4), (2, 9)]
    nothing_complete = TierNaming(Tier.PERSISTENT, 11)
    gone = removable(copies, naming=nothing_complete, lineage=(LineageEntry(1, 3), LineageEntry(2)), ranks=(0,))
    assert [(copy.generation, copy.step) for copy in gone] == [(2, 9)]


def test_what_all_have_written_is_sealed_also_if_that_is_known_before_the_folder_was_looked_at() -> None:
    tier = Tier.PERSISTENT
    schedule = TierSchedule(tier, policy=TierPolicy(1, keep_latest=1), world_size=1, restore_step=-1, sealed=True)
    coordinator = Coordinator(WorldStep("job", 1, 3), world_size=1, schedules=[schedule])
    coordinator.tiers_reported(0, [TierReport(tier, 3, 3, (2, 3))])
    assert coordinator.to_seal == {}
    assert coordinator.namings == ()
    assert coordinator.seals_reported(TierReport(tier, -1, -1, (2,)))
    assert coordinator.to_seal == {tier: 3}
    assert coordinator.namings == (TierNaming(tier, 3, (2,)),)


def test_while_newer_steps_are_suspect_the_newest_clean_one_stays() -> None:
    """Steps go on being written and kept; the clean one is kept as long as it is called so, and none is if none is."""
    clean: list[int | None] = [None]
    proven: list[int | None] = [None]
    marks = StepMarks(clean_step=lambda: clean[0], proven_step=lambda: proven[0])
    schedule = TierSchedule(Tier.DISK, policy=BY_STEPS, world_size=1, restore_step=-1, marks=marks)
    disk: set[int] = set()

    def write(step: int) -> tuple[int, ...]:
        disk.add(step)
        schedule.offer([step], 0.0)
        schedule.report(0, TierReport(Tier.DISK, step, step, tuple(sorted(disk))))
        assert schedule.naming is not None
        disk.intersection_update({*schedule.naming.kept})
        return schedule.naming.kept

    assert [write(step) for step in (2, 4, 6)] == [(2,), (2, 4), (4, 6)]
    clean[0] = 5
    assert [write(step) for step in (8, 10, 12)] == [(4, 6, 8), (4, 8, 10), (4, 10, 12)]
    clean[0] = -1
    assert write(14) == (12, 14)
    clean[0] = 13
    assert write(16) == (12, 14, 16)
    clean[0] = None
    assert write(18) == (16, 18)
    proven[0] = 17  # a replay found nothing then, and nothing is known about what follows
    assert [write(step) for step in (20, 22, 24)] == [(16, 18, 20), (16, 20, 22), (16, 22, 24)]
