"""Which ranks stopped moving, from their beacons as the daemons report them. Pure, and without a clock: a beacon's
age is measured on the host that it lies on.

What is normal is learnt per job: how long its steps take, exactly; how long it stays in other phases, as far as that
was seen. Until something is known of a phase, patience is long; a false alarm costs a restart. An alarm that comes
again at the same step after a restart may be a false one (a long evaluation that the script does not announce), so
each repetition makes patience there ten times longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.signals import RankStalled, RankSteps, Report, SignalBody


class Patience(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a rank may stay in a phase without moving."""

    unknown_s: float  # while nothing was seen of this phase in this job
    floor_s: float
    factor: float  # times the longest usual duration


_PATIENCE = {
    Phase.STARTING: Patience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.RESTORING: Patience(unknown_s=600.0, floor_s=30.0, factor=4.0),
    Phase.STEP: Patience(unknown_s=600.0, floor_s=2.0, factor=8.0),
    Phase.CHECKPOINT: Patience(unknown_s=60.0, floor_s=10.0, factor=8.0),
    Phase.DATA: Patience(unknown_s=600.0, floor_s=30.0, factor=8.0),
    Phase.EVAL: Patience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
    Phase.OTHER: Patience(unknown_s=1800.0, floor_s=60.0, factor=4.0),
}


class StallSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank counts as stalled. A phase that is not named never stalls (parked, done)."""

    phases: Mapping[Phase, Patience] = msgspec.field(default_factory=lambda: dict(_PATIENCE))
    first_step: Patience = Patience(unknown_s=600.0, floor_s=30.0, factor=4.0)  # compiles, warms up
    quantile: float = 0.99
    enough_samples: int = 5  # below, the first step counts as a sample of its successors
    window: int = 512  # step durations remembered per job
    sampled_ranks: int = 8  # whose steps are timed: all ranks of a job tell the same
    behind_steps: int = 2  # a lone rank that far behind the others waits for nobody
    repeat_factor: float = 10.0  # of all deadlines, for each alarm before at this step
    lagged_daemon_s: float = 0.5  # a daemon that ran this late may have been frozen together with its workers
    max_jobs: int = 1_000


_STAYS = 16  # remembered per phase
_PARTS_OF_A_STEP = (Phase.CHECKPOINT, Phase.DATA)  # the time between two steps bounds them
_APART_FROM_STEPS = (Phase.EVAL, Phase.OTHER, Phase.PARKED)  # the time between two steps does not tell of a step


class _Rank:
    __slots__ = (
        "done_at",
        "done_step",
        "entered_s",
        "first_seen_step",
        "forgiven_s",
        "has_stepped",
        "host_id",
        "idle_s",
        "moved_s",
        "pauses",
        "phase",
        "seen_s",
        "step",
    )

    def __init__(self, host_id: str, status: RankStatus, moved_s: float) -> None:
        self.host_id = host_id
        self.phase = status.phase
        self.step = self.first_seen_step = status.step
        self.moved_s = self.entered_s = moved_s
        self.idle_s = 0.0
        self.forgiven_s = 0.0
        self.has_stepped = False
        self.seen_s = moved_s + status.beacon_age_s
        self.pauses = 0  # of the job, at this rank's last step
        self.done_step = -1
        self.done_at = 0.0


class _Job:
    def __init__(self, window: int) -> None:
        self.generation = -1
        self.ranks: dict[int, _Rank] = {}
        self.waiting: set[int] = set()  # those that can stall at all in their phase
        self.overdue: set[int] = set()
        self.newest_step = -1
        self.is_stalled = False
        self.has_attached = False  # a script that never attaches has no beacon to go by
        self.sampled: set[int] = set()
        self.steps: deque[float] = deque(maxlen=window)
        self.usual_step_s: float | None = None  # of `steps`; None: to be computed
        self.stays: dict[Phase, deque[float]] = {}
        self.first_step_s = 0.0
        self.pauses = 0  # grows with what makes the time between two steps say nothing of a step
        self.repeats = 0  # alarms at `alarm_step`, in earlier generations
        self.alarm_step = -1

    def begin(self, generation: int) -> None:
        """A new generation starts afresh, with what was learnt of the job."""
        if self.is_stalled:
            self.repeats = self.repeats + 1 if self.newest_step <= self.alarm_step + 1 else 1
            self.alarm_step = self.newest_step
        self.generation = generation
        self.ranks.clear()
        self.waiting.clear()
        self.overdue.clear()
        self.newest_step = -1
        self.is_stalled = False

    def drop(self, rank: int) -> None:
        self.ranks.pop(rank, None)
        self.waiting.discard(rank)
        self.overdue.discard(rank)


class StallWatch:
    """Progress per job; only its newest generation counts."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, _Job] = {}  # in the order in which they were last heard of
        self._on_host: dict[str, set[tuple[str, int]]] = {}

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """RankStalled for every generation that this report shows to have stopped, once per episode. `now_s` only
        places what this report says beside what others said."""
        host_id = report.facts.host_id
        present: set[tuple[str, int]] = set()
        stepped: set[tuple[str, int]] = set()
        for steps in report.steps:
            job = self._jobs.get(steps.job)
            if job is not None and steps.generation == job.generation and steps.completed_at:
                self._time_steps(job, steps)
                stepped.add((steps.job, steps.rank))
        signals: list[SignalBody] = []
        lagged_s = report.lagged_s if report.lagged_s >= self._settings.lagged_daemon_s else 0.0
        for status in report.ranks:
            job = self._job(status)
            if job is None:
                continue
            present.add((status.job, status.rank))
            rank = self._update(job, host_id, status, now_s, lagged_s)
            rank.has_stepped = rank.has_stepped or (status.job, status.rank) in stepped
            self._judge(job, status.rank, rank)
            found = self._stall(status.job, job, status.rank)
            if found is not None:
                signals.append(found)
        for name, number in self._on_host.get(host_id, set()) - present:
            gone = self._jobs.get(name)
            if gone is not None and number in gone.ranks and gone.ranks[number].host_id == host_id:
                gone.drop(number)
        if present:
            self._on_host[host_id] = present
        else:
            self._on_host.pop(host_id, None)
        return signals

    def forget(self, host_id: str) -> None:
        """Drop the ranks of a host that will not speak for them any more."""
        for name, number in self._on_host.pop(host_id, set()):
            job = self._jobs.get(name)
            if job is not None and number in job.ranks and job.ranks[number].host_id == host_id:
                job.drop(number)

    def __len__(self) -> int:
        return sum(len(job.ranks) for job in self._jobs.values())

    def _job(self, status: RankStatus) -> _Job | None:
        job = self._jobs.pop(status.job, None)
        if job is None:
            job = _Job(self._settings.window)
            if len(self._jobs) >= self._settings.max_jobs:
                del self._jobs[next(iter(self._jobs))]
        self._jobs[status.job] = job
        if status.generation > job.generation:
            job.begin(status.generation)
        return job if status.generation == job.generation else None

    def _update(self, job: _Job, host_id: str, status: RankStatus, now_s: float, lagged_s: float) -> _Rank:
        moved_s = now_s - status.beacon_age_s
        rank = job.ranks.get(status.rank)
        if rank is None:
            rank = job.ranks[status.rank] = _Rank(host_id, status, moved_s)
        was = rank.phase
        if status.phase is not was:
            lasted_s = max(0.0, moved_s - rank.entered_s)
            job.stays.setdefault(rank.phase, deque(maxlen=_STAYS)).append(lasted_s)
            rank.entered_s = moved_s
        if status.step > rank.first_seen_step and not rank.has_stepped:
            rank.has_stepped = True
            began_s = rank.entered_s if was is Phase.STEP else rank.seen_s
            job.first_step_s = max(job.first_step_s, moved_s - began_s, 1e-3)
        has_moved = status.phase is not was or status.step != rank.step or status.beacon_age_s < rank.idle_s
        if has_moved:
            rank.forgiven_s = 0.0
        rank.forgiven_s += lagged_s
        rank.host_id = host_id
        rank.phase, rank.step = status.phase, status.step
        rank.moved_s = moved_s if has_moved else min(rank.moved_s, moved_s)
        rank.idle_s = status.beacon_age_s
        rank.seen_s = now_s
        if lagged_s or status.phase in _APART_FROM_STEPS:
            job.pauses += 1
        job.newest_step = max(job.newest_step, status.step)
        if job.newest_step > job.alarm_step + 1:
            job.repeats = 0
        job.has_attached = job.has_attached or status.phase is not Phase.STARTING
        return rank

    def _time_steps(self, job: _Job, steps: RankSteps) -> None:
        rank = job.ranks.get(steps.rank)
        if rank is None:
            return
        if len(job.sampled) < self._settings.sampled_ranks:
            job.sampled.add(steps.rank)
        if steps.rank in job.sampled:
            times = steps.completed_at
            if rank.done_step == steps.first_step - 1 and rank.done_at and rank.pauses == job.pauses:
                times = (rank.done_at, *times)
            job.steps.extend(max(0.0, later - earlier) for earlier, later in pairwise(times))
            job.usual_step_s = None
        rank.done_step = steps.first_step + len(steps.completed_at) - 1
        rank.done_at = steps.completed_at[-1]
        rank.pauses = job.pauses

    def _judge(self, job: _Job, number: int, rank: _Rank) -> None:
        deadline_s = self._deadline_s(job, rank)
        if deadline_s is None:
            job.waiting.discard(number)
        else:
            job.waiting.add(number)
        if deadline_s is not None and rank.idle_s - rank.forgiven_s > deadline_s:
            job.overdue.add(number)
        else:
            if number in job.overdue:
                job.is_stalled = False
            job.overdue.discard(number)

    def _deadline_s(self, job: _Job, rank: _Rank) -> float | None:
        """How long this rank may stay as it is; None: for ever."""
        usual_s = self._first_deadline_s(job, rank)
        return None if usual_s is None else usual_s * self._settings.repeat_factor**job.repeats

    def _first_deadline_s(self, job: _Job, rank: _Rank) -> float | None:
        patience = self._settings.phases.get(rank.phase)
        if patience is None or (rank.phase is Phase.STARTING and not job.has_attached):
            return None
        if rank.phase is Phase.STEP and not rank.has_stepped:
            return _limit(self._settings.first_step, job.first_step_s)
        if rank.phase is Phase.STEP:
            return _limit(patience, self._usual_step_s(job))
        seen_s = max(job.stays.get(rank.phase, ()), default=0.0)
        if rank.phase in _PARTS_OF_A_STEP:
            seen_s = max(seen_s, self._usual_step_s(job))
        return _limit(patience, seen_s)

    def _usual_step_s(self, job: _Job) -> float:
        if job.usual_step_s is None or not job.steps:
            usual_s = _quantile(job.steps, self._settings.quantile)
            if len(job.steps) < self._settings.enough_samples:
                usual_s = max(usual_s, job.first_step_s)
            job.usual_step_s = usual_s
        return job.usual_step_s

    def _stall(self, name: str, job: _Job, number: int) -> RankStalled | None:
        """A stall that shows in this rank: of the whole job, or of the rank alone, far behind the others."""
        if job.is_stalled or number not in job.overdue:
            return None
        rank = job.ranks[number]
        if len(job.overdue) == len(job.waiting):
            named = self._furthest_behind(job)
        elif job.newest_step - rank.step >= self._settings.behind_steps:
            named = (number,)
        else:
            return None
        job.is_stalled = True
        first = job.ranks[named[0]]
        return RankStalled(
            job=name,
            generation=job.generation,
            ranks=named,
            phase=first.phase,
            step=first.step,
            silent_s=first.idle_s,
            deadline_s=self._deadline_s(job, first) or 0.0,
        )

    def _furthest_behind(self, job: _Job) -> tuple[int, ...]:
        """The lowest step, then the oldest beacon; those that cannot be told apart are all named."""
        lowest = min(job.ranks[number].step for number in job.waiting)
        last = [number for number in job.waiting if job.ranks[number].step == lowest]
        oldest_s = min(job.ranks[number].moved_s for number in last)
        indistinct_s = max(0.05, 0.5 * self._usual_step_s(job))
        return tuple(sorted(n for n in last if job.ranks[n].moved_s - oldest_s <= indistinct_s))


def _limit(patience: Patience, seen_s: float) -> float:
    return max(patience.floor_s, patience.factor * seen_s) if seen_s > 0.0 else patience.unknown_s


def _quantile(samples: Iterable[float], quantile: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0
