"""The hosts of the small world, and their workers."""

from __future__ import annotations

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import (
    Activity,
    Phase,
    Placement,
    RankStatus,
)
from flyball.contracts.decisions import (
    Command,
    CommandUpdate,
)
from flyball.contracts.identity import Fence
from flyball.contracts.reports.signals import (
    Signal,
)


class Worker:
    def __init__(self, rank: int, placement: Placement, pid: int, now: float) -> None:
        self.rank = rank
        self.placement = placement
        self.pid = pid
        self.ready_at = now + 0.3
        self.phase = Phase.STARTING
        self.step = -1
        self.done: list[tuple[int, float]] = []
        self.moved_at = now
        self.alive = True
        self.hung = False
        self.parks_at = -1

    def status(self, now: float) -> RankStatus:
        """As its daemon sees it."""
        of, stands_s = self.placement, now - self.moved_at
        doing = Activity.STOPPED if self.hung else Activity.IDLE
        seen = (Activity.UNKNOWN, 0.0) if stands_s < 0.5 else (doing, stands_s)
        return RankStatus(of.job, of.generation, self.rank, self.pid, self.phase, self.step, stands_s, *seen)


class SmallHost:
    def __init__(self, name: str, domain: str) -> None:
        self.name = name
        self.domain = domain
        self.incarnation = f"{name}-1"
        self.alive = True
        self.cut_off = False
        self.workers: dict[int, Worker] = {}
        self.copies: dict[tuple[Tier, int], list[ShardCopy]] = {}
        self.signals: list[Signal] = []
        self.seq = 0
        self.next_report_at = 0.0
        self.obeyed: dict[str, CommandUpdate] = {}
        self.fence = Fence(0, 0)
        self.saving: list[Command] = []
        self.placement: Placement | None = None  # the engine's; it outlives the workers

    def inventory(self) -> tuple[ShardCopy, ...]:
        return tuple(copy for copies in self.copies.values() for copy in copies)

    def keep(self, copy: ShardCopy) -> None:
        slots = self.copies.setdefault((copy.tier, copy.rank), [])
        slots.append(copy)
        del slots[:-2]
