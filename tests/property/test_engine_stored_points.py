"""The newest step that the supervisor has stored stays in the shared folder, whenever its hosts are cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.rules.retention_rules import removable, unconfirmed
from ckpt_engine.rules.tier_schedule import TierSchedule
from ckpt_engine.tiers.writing.tier_retention import LISTED_S, TierRetention
from flyball.contracts.checkpoints import (
    CheckpointSpec,
    Lineage,
    LineageEntry,
    ShardCopy,
    StoredPoint,
    StoredPoints,
    Tier,
    TierPolicy,
)

BEYOND = 16
EVERY_S = 50.0


class Folder:
    """A store of complete steps of one rank."""

    tier = Tier.PERSISTENT

    def __init__(self) -> None:
        self.steps: set[int] = set()

    def sealed_steps(self, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        return tuple(sorted(self.steps))

    def held(self, rank: int, lineage: Lineage, *, or_unread: bool = False) -> tuple[int, ...]:
        return tuple(sorted(self.steps))

    def scan_worlds(self, steps: Iterable[tuple[int, int]]) -> None:
        assert self.steps.issuperset(step for _, step in steps)

    def prune(self, *, may_go_on: Callable[[], bool], **rule: Any) -> bool:  # noqa: ANN401 - handed on
        copies = [ShardCopy("job", 1, step, 0, self.tier, "", 1, "") for step in self.steps]
        self.steps -= {copy.step for copy in removable(copies, **rule)}
        return may_go_on()


SCHEDULED: dict[str, Any] = {"policy": TierPolicy(1, keep_latest=1), "world_size": 1, "restore_step": -1}


@dataclass
class World:
    """A job on one host that writes its steps at once, and its supervisor."""

    keep_latest: int
    schedule: TierSchedule = field(default_factory=lambda: TierSchedule(Tier.PERSISTENT, **SCHEDULED))
    folder: Folder = field(default_factory=Folder)
    step: int = -1
    now_s: float = 0.0
    is_linked: bool = True
    in_touch: bool = False
    known_points: StoredPoints = field(default_factory=dict)  # by the engine, in the newest reply
    reported: int = -1  # newest complete step that a sensor has received
    stored: int = -1  # the newest of those in SQL
    learned: int = -1  # the newest of those that a sensor knows

    def __post_init__(self) -> None:
        self.restart_engine()

    def restart_engine(self) -> None:
        self.in_touch, self.known_points = False, {}
        generation: Any = SimpleNamespace(
            job="job",
            lineage=(LineageEntry(1),),
            stored_ranks=(0,),
            ended=threading.Event(),
            generation_of=lambda step: 1,
            configure=SimpleNamespace(spec=CheckpointSpec(persistent_dir="/d", persistent_every_steps=1)),
        )
        folder: Any = self.folder
        self.retention = TierRetention(
            generation,
            folder,
            rank=0,
            counters=Counters(),
            in_touch=lambda: self.in_touch,
            stored_points=lambda: self.known_points,
            monotonic_s=lambda: self.now_s,
            on_spared=self.schedule.spare,
        )
        self.retention.begin()

    def write(self, spared: tuple[int, ...] = ()) -> None:
        """Write the next step, and prune; `spared` as in a naming."""
        self.step += 1
        self.now_s += EVERY_S
        self.folder.steps.add(self.step)
        kept = tuple(sorted(self.folder.steps)[-self.keep_latest :])
        self.retention.prune(TierNaming(Tier.PERSISTENT, self.step, kept, spared))

    def do(self, event: str) -> None:
        match event:
            case "write":
                self.write()
            case "write many":
                for _ in range(5):
                    self.write()
            case "report" if self.is_linked:
                self.retention.note_reported(frozenset(self.folder.steps))
                self.reported = max(self.folder.steps, default=-1)
                self.known_points = {"job": StoredPoint(self.learned, 1)} if self.learned >= 0 else self.known_points
                self.in_touch = True
                self.retention.note_reported(frozenset(self.folder.steps))  # asked several times in a touch
            case "store":
                self.stored = self.reported
            case "learn":
                self.learned = self.stored
            case "cut" | "heal":
                self.is_linked = event == "heal"
            case "touch is over" if not self.is_linked:
                self.in_touch = False
            case "engine restarts":
                self.restart_engine()

    @property
    def known_to_engine(self) -> int:
        return self.known_points["job"].step if self.known_points else -1


EVENTS = ("write", "write many", "report", "store", "learn", "cut", "heal", "touch is over", "engine restarts")
BEHIND = ["report", *["write"] * 2, "report", "store", *["write"] * 3, "cut"]  # two are kept: this was the hole


@settings(max_examples=500)
@example(2, BEHIND)
@example(1, [*BEHIND, "touch is over", "write many", "write many"])
@given(st.integers(1, 3), st.lists(st.sampled_from(EVENTS), max_size=60))
def test_what_a_restore_would_name_is_there(keep_latest: int, history: list[str]) -> None:
    world = World(keep_latest)
    is_overrun = False  # more steps than are kept for a supervisor that lags behind
    for event in history:
        was_there = world.known_to_engine in world.folder.steps
        known = world.known_to_engine
        world.do(event)
        is_overrun |= world.step - world.known_to_engine > BEYOND
        if was_there and world.known_to_engine == known:
            assert known in world.folder.steps, "however far behind the supervisor is"
        if world.stored >= 0 and not is_overrun:
            assert world.stored in world.folder.steps, f"of {sorted(world.folder.steps)}"


def test_a_host_out_of_touch_keeps_what_the_coordinators_host_reports_until_both_are_given_up() -> None:
    """Ranks of two hosts. The supervisor hears of both ranks' steps from the one that is in touch."""
    near, away = World(1), World(1)

    def write() -> None:
        naming = near.schedule.naming
        assert naming is not None
        near.write(naming.spared)
        away.write(naming.spared)

    near.schedule.report(0, TierReport(Tier.PERSISTENT, -1, -1))
    for _ in range(30):
        near.do("report")
        near.do("store")
        near.do("learn")
        write()
    near.do("report")
    near.do("cut")
    near.do("touch is over")
    for _ in range(30):
        write()
        assert near.reported in near.folder.steps & away.folder.steps
    assert len(away.folder.steps) < 10, "and not all that there ever was"


def test_out_of_touch_a_step_stays_for_a_while_after_it_was_the_newest() -> None:
    """Others may have looked into the store, and be about to restore it."""
    world = World(1)
    for event in ["report", "store", "learn", "write", "report", "cut", "touch is over"]:
        world.do(event)
    known = world.step
    for _ in range(20):
        newest, listed_at_s = world.step, world.now_s
        while world.now_s + EVERY_S < listed_at_s + LISTED_S:
            world.write()
            assert {known, newest} <= world.folder.steps
    assert len(world.folder.steps) <= 3 + LISTED_S / EVERY_S


@given(st.none() | st.integers(0, 99), st.sets(st.integers(0, 99)))
def test_a_step_that_is_stored_stays_with_so_many_after_it(stored: int | None, held: Collection[int]) -> None:
    kept = unconfirmed(stored, held)
    newer = {step for step in held if stored is None or step > stored}
    assert stored is None or stored in kept
    assert kept - {stored} == set(sorted(newer)[-BEYOND:])
