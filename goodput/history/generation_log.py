"""The generations of one job, built from their events. Pure.

Every value is a minimum, a maximum or a union over events, so their order and repetition do not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from flyball.contracts.events import Event
from goodput.history.facts import LoggedGeneration, LoggedIncident, WaitSample
from goodput.history.phases import PhaseLog, StartUp, Waiting
from goodput.history.step_log import SettledStep, WorldStepLog
from goodput.history.values import moment, number, text, whole

_TOTALS = {"save_blocked_s": Waiting.CHECKPOINT, "data_wait_s": Waiting.DATA}


_ATTACHED, _RESTORES, _RESTORED = 1, 2, 4  # bits: what a rank has reached
_MARKS = {"attached_at": _ATTACHED, "restore_began_at": _RESTORES, "restored_at": _RESTORED}
_MOST_RANKS = 1_000_000  # the most ranks for which this is kept
MOST_SAVES = 1000  # the newest ones that are kept of a settled generation: enough for how often it saves


class GenerationLog(msgspec.Struct):
    """The accumulated events of one generation."""

    is_known: bool = False  # has more than its grant
    started_at: float = math.inf  # the earliest, as the next two
    granted_at: float = math.inf
    spawned_first_at: float = math.inf
    spawned_at: float = -math.inf  # the latest, as the next three
    restore_began_at: float = -math.inf
    restored_at: float = -math.inf
    attached_at: float = -math.inf
    reached: bytearray = msgspec.field(default_factory=bytearray)  # per rank, the bits above
    restore_steps: set[int] = set()  # named by the controller
    restored_steps: set[int] = set()  # fetched by the engines
    incidents: set[str] = set()
    steps: WorldStepLog = msgspec.field(default_factory=WorldStepLog)
    phases: PhaseLog = msgspec.field(default_factory=PhaseLog)
    waited: dict[Waiting, dict[int | str, set[WaitSample]]] = msgspec.field(
        default_factory=lambda: {waiting: {} for waiting in _TOTALS.values()}
    )
    logs_blocking: bool = False
    saved_steps: set[int] = set()
    hosts: int = 0
    world_size: int | None = None
    world_size_full: int | None = None

    def add_marks(self, event: Event) -> None:
        """Add a RANK_MARKS event."""
        self.is_known = True
        if (at := moment(event, "spawned_at")) is not None:
            self.spawned_first_at = min(self.spawned_first_at, at)
            self.spawned_at = max(self.spawned_at, at)
        for name in ("attached_at", "restore_began_at", "restored_at"):
            if (at := moment(event, name)) is not None:
                setattr(self, name, max(at, getattr(self, name)))
                self._mark(event.rank, _MARKS[name])
        self.add_waits(event)

    def _mark(self, rank: int, mark: int) -> None:
        """Uses one byte per rank: a job may have 100,000 ranks and a hundred generations."""
        if 0 <= rank < _MOST_RANKS:
            self.reached.extend(bytes(max(0, rank + 1 - len(self.reached))))
            self.reached[rank] |= mark

    def add_waits(self, event: Event) -> None:
        """Add the totals of blocking saves and data waits, from any event that has them."""
        for name, waiting in _TOTALS.items():
            if name not in event.data:
                continue
            total_s = number(event.data, name)
            self.logs_blocking |= total_s is not None and waiting is Waiting.CHECKPOINT
            if total_s is not None and total_s > 0:
                who: int | str = text(event.data, "sensor") or event.rank
                self.waited[waiting].setdefault(who, set()).add(WaitSample(event.at, total_s))

    def add_started(self, event: Event) -> None:
        """Add a GENERATION_STARTED event."""
        self.is_known = True
        self.started_at = min(self.started_at, event.at)
        if "restore_step" in event.data:
            step = whole(event.data, "restore_step")
            self.restore_steps.add(-1 if step is None else step)
        self._add_plan(event)

    def add_granted(self, event: Event) -> None:
        """Add a GENERATION_GRANTED event."""
        self.granted_at = min(self.granted_at, event.at)
        self._add_plan(event)

    def _add_plan(self, event: Event) -> None:
        """Add the generation's incident and size."""
        if event.incident_id:
            self.incidents.add(event.incident_id)
        hosts = event.data.get("hosts")
        count = len(hosts) if isinstance(hosts, list) else whole(event.data, "hosts")
        self.hosts = max(self.hosts, count or 0)
        self.world_size = larger(self.world_size, whole(event.data, "world_size", least=1))
        self.world_size_full = larger(self.world_size_full, whole(event.data, "full_world_size", least=1))

    def settle(self, steps: Sequence[SettledStep]) -> None:
        """Keep these instead of all steps, waits and phases up to the last of them."""
        until = steps[-1].at
        self.steps.settle(steps)
        self.phases.settle(until)
        for by_rank in self.waited.values():
            for who, samples in by_rank.items():
                last = max((sample for sample in samples if sample.at <= until), default=None)
                by_rank[who] = {sample for sample in samples if sample.at > until or sample == last}
        self.saved_steps = set(sorted(self.saved_steps)[-MOST_SAVES:])

    def longest_waits(self) -> dict[Waiting, tuple[WaitSample, ...]]:
        """The waits of the rank that waited longest, or of a sensor's summary: the others' waits lie within them."""
        longest = {}
        for waiting, by_rank in self.waited.items():
            if by_rank:
                samples = max(by_rank.values(), key=lambda samples: (max(s.total_s for s in samples), sorted(samples)))
                longest[waiting] = tuple(sorted(samples))
        return longest

    def restore(self, phases: StartUp, *, has_steps: bool) -> tuple[float | None, float | None]:
        """When the last rank began to restore, and when it had its state, or attached without anything to restore.

        None: some rank has not reached that point. A rank with completed steps has, whatever the log lacks.
        """
        began_at = _known(self.restore_began_at, phases.restore_began_at)
        restored_at = _known(self.restored_at, phases.restored_at)
        if not has_steps:
            if phases.starting or (_ATTACHED in self.reached and max(self.reached) > _ATTACHED):
                return None, None
            if phases.restoring or _RESTORES in self.reached or (_ATTACHED | _RESTORES) in self.reached:
                return began_at, None
        if began_at is None and restored_at is None and (has_steps or self.restore_steps == {-1}):
            restored_at = _known(self.attached_at)
        return began_at, restored_at

    def restore_step(self) -> int | None:
        """The step it continued from: as the controller named it, else as the engines restored it, else the one
        before its first logged step."""
        if self.restore_steps or self.restored_steps:
            return min(self.restore_steps or self.restored_steps)
        first = self.steps.first_step
        return None if first is None else first - 1


class FullSize(NamedTuple):
    """The number of ranks of a job at full size; None if unknown."""

    ranks: int | None
    is_logged: bool  # not guessed from the ranks that it ran with


def full_size(logs: Collection[GenerationLog], submitted: int | None) -> FullSize:
    """The full size: as generations log it, else as submitted, else the largest that the job ran with."""
    logged = max((log.world_size_full or 0 for log in logs), default=0) or submitted
    if logged:
        return FullSize(logged, is_logged=True)
    largest = max((log.world_size or 0 for log in logs), default=0)
    return FullSize(largest or max((log.steps.ranks for log in logs), default=0) or None, is_logged=False)


def generations(
    logs_of: Mapping[int, GenerationLog], incidents: Sequence[LoggedIncident], full_size: FullSize
) -> tuple[LoggedGeneration, ...]:
    """All generations, in order."""
    logs = sorted((n, log) for n, log in logs_of.items() if log.is_known)
    answered = _answered_incidents(logs, incidents)
    most_hosts = max((log.hosts for _, log in logs), default=0)
    added = _added_by_epochs(logs)
    found: list[LoggedGeneration] = []
    resumed_from: int | None = None
    for n, log in reversed(logs):
        restore_step = log.restore_step()
        if restore_step is not None and restore_step >= 0:
            restore_step += added[n]
        world = log.steps.world_steps(resumed_from, added[n])
        phases = log.phases.start_up()
        started = [t for t in (log.started_at, log.spawned_first_at, phases.began_at) if t is not None]
        started_at = log.started_at if log.started_at < math.inf else min(started)
        signs = [*started, *(s.at for s in world.steps[:1])]
        restore_began_at, restored_at = log.restore(phases, has_steps=bool(world.steps))
        capacity = _share(log.world_size, full_size.ranks) if log.world_size else _share(log.hosts, most_hosts)
        found.append(
            LoggedGeneration(
                generation=n,
                incident_id=answered[n],
                began_at=_known(min(signs)),
                started_at=_known(started_at),
                spawned_at=_known(log.spawned_at),
                restore_began_at=restore_began_at,
                restored_at=restored_at,
                restore_step=restore_step,
                steps=world.steps,
                last_ranks=world.last_ranks,
                clocks=world.clocks,
                epochs=world.epochs,
                waited=log.longest_waits(),
                phases=log.phases.spans(),
                capacity=capacity,
                capacity_is_guess=not (log.world_size and full_size.is_logged),
                saved_steps=frozenset(log.saved_steps),
                lost_logs=world.lost_logs,
                logs_blocking=log.logs_blocking,
                numbered_from=added[n],
                settled={s.step + added[n]: s for s in log.steps.settled},
                settled_until=log.steps.settled[-1].at if log.steps.settled else -math.inf,
            )
        )
        resumed_from = restore_step if restore_step is not None else resumed_from
    return tuple(reversed(found))


def _added_by_epochs(logs: Sequence[tuple[int, GenerationLog]]) -> dict[int, int]:
    """The offset of each generation's step numbers if scripts start them over with every epoch.

    A generation continues in the newest epoch, or in the previous one if its step is beyond the newest epoch's last
    step.
    """
    added: dict[int, int] = {}
    starts, newest = [0], -1
    for n, log in logs:
        restore_step = log.restore_step()
        if log.restore_steps and restore_step == -1:
            starts = [0]  # from scratch
        elif restore_step is not None and restore_step > newest and len(starts) > 1:
            starts.pop()
        added[n] = starts[-1]
        epochs = log.steps.epochs()
        starts = [*starts[:-1], *(starts[-1] + start for start in log.steps.epoch_starts(epochs))]
        last = log.steps.last_number(epochs)
        newest = newest if last is None else last
    return added


def larger(one: int | None, other: int | None) -> int | None:
    """The larger of the known ones."""
    return max(one, other) if one is not None and other is not None else other if one is None else one


def _known(value: float, otherwise: float | None = None) -> float | None:
    return value if math.isfinite(value) else otherwise


def _share(used: int, full: int | None) -> float:
    return used / full if used and full else 1.0


def _answered_incidents(
    logs: Sequence[tuple[int, GenerationLog]], incidents: Sequence[LoggedIncident]
) -> Mapping[int, str]:
    """The incident that each generation answers: as its events say, else the newest one open at the time."""
    answered = {n: max(log.incidents, default="") for n, log in logs}
    asking = sorted((min(log.granted_at, log.started_at), n) for n, log in logs if not answered[n])
    open_ones: list[tuple[int, float]] = []  # (minus the index in `incidents`, when it closed): the newest first
    coming = 0
    for at, n in asking:
        if not math.isfinite(at):
            continue
        while coming < len(incidents) and incidents[coming].opened_at <= at:
            closed_at = incidents[coming].closed_at
            heapq.heappush(open_ones, (-coming, math.inf if closed_at is None else closed_at))
            coming += 1
        while open_ones and open_ones[0][1] < at:
            heapq.heappop(open_ones)
        if open_ones:
            answered[n] = incidents[-open_ones[0][0]].incident_id
    return answered
