"""Reads the beacons of this host's ranks: each step once, the key times of a worker's life, each rank's position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import Activity, Phase, RankStatus
from flyball.contracts.decisions import RankPosition
from flyball.contracts.errors import StateVersionMismatch
from flyball.contracts.on_host.segments import STACKS_SUFFIX, beacon_path
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import RankMarks
from flyball.contracts.reports.training_health import RankCompute, RankLoss, loss_value
from flyball.sdk.beacon import BEFORE_THE_FIRST, BeaconReader, BeaconSnapshot, create_beacon
from flyball.worker_user import WorkerUser
from host_daemon.engine.save_watch import TrainedRank
from host_daemon.kernel.activity import Key, Seen, StalledWorker
from host_daemon.workers.seen_steps import SEEN_SUFFIX, read_seen, write_seen

MAX_WAITING_STEPS = 10_000  # per rank, while no report gets through
STEPS_PER_REPORT = 1_000  # per rank
EAGER_STEPS = 3  # the first steps of a generation are reported at once: they resolve an incident
WAITS_EVERY_S = 5.0
STANDS_AFTER_S = 0.5  # or twice the usual step, if that is longer
STANDS_UNATTACHED_AFTER_S = 5.0
# After which its stack is read: a second, or so many usual steps; longer where it need not make steps.
STACK_AFTER_S, STACK_AFTER_STEPS, STACK_APART_AFTER_S = 1.0, 20.0, 10.0
REOPEN_S = 1.0  # until a beacon that cannot be opened is tried again
COMPUTED_STEPS = 10  # in a report of how long a rank computed, at least
_AHEAD_NS = 5_000_000_000  # of this process's clock: it was read before the beacon was
USUAL_STEPS = 15  # newest steps, whose median is the usual one
_BESIDE = (SEEN_SUFFIX, STACKS_SUFFIX)  # files of a beacon
NO_STANDS: Mapping[Key, RankStand] = {}

_log = structlog.get_logger(__name__)


class BeaconReadings(msgspec.Struct, frozen=True):
    """The ranks' part of one report. Pass it to `put_back` if the report fails."""

    steps: tuple[RankSteps, ...]
    marks: tuple[RankMarks, ...]
    seen: tuple[tuple[str, int], ...]  # beacon path, steps completed so far
    losses: tuple[RankLoss, ...] = ()
    computes: tuple[RankCompute, ...] = ()


@dataclass(slots=True)
class _WatchedBeacon:
    job: str
    generation: int
    rank: int
    pid: int
    spawned_at: float
    path: str
    count: int
    reader: BeaconReader | None = None  # None: its file cannot be opened, or no more is to be read
    retry_s: float = 0.0  # when to try to open it again
    snapshot: BeaconSnapshot = BEFORE_THE_FIRST
    waiting: deque[tuple[int, float]] = field(default_factory=deque)  # (step, wall time)
    marks: RankMarks | None = None  # as last read
    marks_reported: RankMarks | None = None
    marks_reported_s: float = 0.0
    loss_reported: tuple[int, float] | None = None
    computed: tuple[int, int] = (0, 0)  # steps and nanoseconds reported so far
    live: bool = True
    trouble: str = ""  # why it could not be read last; '' if it could
    removed: bool = False  # its file is gone; kept until everything read from it is reported

    @property
    def is_read(self) -> bool:
        """Whether it could ever be read."""
        return self.snapshot is not BEFORE_THE_FIRST

    def close(self) -> None:
        """Read no more of it."""
        if self.reader is not None:
            self.reader.close()
        self.reader = None


class Beacons:
    """All beacons of this host, ordered by the start of their generations."""

    def __init__(self, *, shm_prefix: str, clock: Clock, user: WorkerUser | None = None) -> None:
        self._prefix = shm_prefix
        self._user = user
        self._clock = clock
        self._watched: dict[tuple[str, int, int], _WatchedBeacon] = {}
        self._seen: Mapping[Key, Seen] = {}
        self._stands: Mapping[Key, RankStand] = {}

    def create(self, job: str, generation: int, rank: int) -> None:
        """Create a fresh beacon for a worker that is about to start. Raises MemoryTooSmall."""
        path = beacon_path(self._prefix, job, generation, rank)
        create_beacon(path)
        if self._user is not None:
            self._user.give(Path(path), 0o600)
        for suffix in _BESIDE:
            Path(path + suffix).unlink(missing_ok=True)

    def path_of(self, job: str, generation: int, rank: int) -> str:
        """Where a rank's beacon is."""
        return beacon_path(self._prefix, job, generation, rank)

    def watch(self, job: str, generation: int, rank: int, *, pid: int, spawned_at: float) -> None:
        """Read this beacon from now on. If an earlier daemon watched it, continue where its reports ended.

        While it cannot be read the rank counts as one that does nothing, and is tried again: either it can be read
        later, or the rank stalls, and its next worker gets a new beacon."""
        path = beacon_path(self._prefix, job, generation, rank)
        before = self._watched.get((job, generation, rank))
        if before is not None:
            before.close()
        watched = _WatchedBeacon(job, generation, rank, pid, spawned_at, path, read_seen(path))
        self._watched[job, generation, rank] = watched
        watched.snapshot = self._look(watched) or watched.snapshot

    def sample(self) -> bool:
        """Read all beacons of live workers. Returns whether something should be reported at once."""
        urgent = False
        for watched in self._watched.values():
            if watched.live:
                urgent |= self._read(watched)
        return urgent

    def worker_ended(self, job: str, generation: int, rank: int) -> None:
        """Read a dead worker's beacon for the last time."""
        watched = self._watched.get((job, generation, rank))
        if watched is not None and watched.live:
            self._read(watched)
            watched.live = False
            watched.close()

    def last_step(self, job: str, generation: int, rank: int) -> int:
        """The newest step that the rank completed, -1 if none."""
        watched = self._watched.get((job, generation, rank))
        return watched.snapshot.step if watched else -1

    def last_phase(self, job: str, generation: int, rank: int) -> Phase | None:
        """The rank's phase when its beacon was last read, None if it never was."""
        watched = self._watched.get((job, generation, rank))
        return watched.snapshot.phase if watched and watched.is_read else None

    def positions(self, job: str, *, upto_generation: int) -> tuple[RankPosition, ...]:
        """The newest steps of the ranks of the newest generation, at most `upto_generation`; also of dead ranks."""
        ours = [w for w in self._watched.values() if w.job == job and w.generation <= upto_generation]
        newest = max((w.generation for w in ours), default=0)
        return tuple(RankPosition(w.rank, w.snapshot.step) for w in ours if w.generation == newest and w.is_read)

    def standing(self) -> list[StalledWorker]:
        """Live workers whose beacons have not moved for longer than usual. Pass what these workers do to `see`."""
        now_ns, wall_s = self._now()
        return [
            StalledWorker(key, w.pid)
            for key, w in self._watched.items()
            if w.live and _age_s(w, now_ns, wall_s) > _usual_s(w.snapshot)
        ]

    def standing_for_long(self) -> list[StalledWorker]:
        """Live workers that made no step for so long that it is worth reading their stacks. Pass those to `see`."""
        now_ns, wall_s = self._now()
        return [
            StalledWorker(key, w.pid)
            for key, w in self._watched.items()
            if w.live and _age_s(w, now_ns, wall_s) > _stack_after_s(w.snapshot)
        ]

    def see(self, seen: Mapping[Key, Seen], stands: Mapping[Key, RankStand] = NO_STANDS) -> bool:
        """Take what stalled workers were seen doing, and where those stand that have for long: all of them. Returns
        whether to report it at once."""
        before, self._seen = self._seen, seen
        stands_before, self._stands = self._stands, stands
        stopped = {key for key, found in seen.items() if found.activity is Activity.STOPPED}
        is_new = any(stands_before.get(key) != stand for key, stand in stands.items())
        return is_new or any(key not in before or before[key].activity is not Activity.STOPPED for key in stopped)

    def trained(self) -> tuple[TrainedRank, ...]:
        """Live workers that have completed steps."""
        return tuple(
            TrainedRank(
                job=w.job,
                generation=w.generation,
                rank=w.rank,
                spawned_at=w.spawned_at,
                first_step_at=w.marks.first_step_at,
                steps=w.snapshot.step_count,
                newest_step=w.snapshot.step,
            )
            for w in self._watched.values()
            if w.live and w.marks is not None and w.marks.first_step_at > 0.0
        )

    def statuses(self) -> tuple[RankStatus, ...]:
        """Live workers as their beacons show them, and what the stalled ones do."""
        now_ns, wall_s = self._now()
        return tuple(
            RankStatus(
                job=w.job,
                generation=w.generation,
                rank=w.rank,
                pid=w.pid,
                phase=w.snapshot.phase,
                step=w.snapshot.step,
                beacon_age_s=_age_s(w, now_ns, wall_s),
                activity=seen.activity if seen else Activity.UNKNOWN,
                activity_s=max(0.0, now_ns / 1e9 - seen.since_s) if seen else 0.0,
                place=seen.place if seen else "",
                stand=self._stands.get(key),
            )
            for key, w in self._watched.items()
            if w.live
            for seen in (self._seen.get(key),)
        )

    def take(self) -> BeaconReadings:
        """Steps and times that no report has carried yet."""
        now_s = self._clock.monotonic_s()
        steps: list[RankSteps] = []
        marks: list[RankMarks] = []
        seen: list[tuple[str, int]] = []
        for watched in self._watched.values():
            if watched.waiting:
                steps += _runs(watched, [watched.waiting.popleft() for _ in range(_at_most(watched.waiting))])
                seen.append((watched.path, watched.count - len(watched.waiting)))
            if _marks_are_due(watched, now_s) and watched.marks is not None:
                marks.append(watched.marks)
                watched.marks_reported, watched.marks_reported_s = watched.marks, now_s
        return BeaconReadings(tuple(steps), tuple(marks), tuple(seen), tuple(self._losses()), tuple(self._computes()))

    def _computes(self) -> Iterator[RankCompute]:
        """How long the ranks computed, if they made enough steps to say so. A report that is lost costs a sample."""
        for watched in self._watched.values():
            total_steps, total_ns = watched.snapshot.computed_steps, watched.snapshot.compute_ns
            steps, compute_ns = total_steps - watched.computed[0], total_ns - watched.computed[1]
            if steps >= COMPUTED_STEPS and compute_ns >= 0:
                watched.computed = (total_steps, total_ns)
                yield RankCompute(watched.job, watched.generation, watched.rank, steps, compute_ns / 1e9)

    def _losses(self) -> Iterator[RankLoss]:
        """For each generation, the loss of its lowest rank here that has one, if it changed."""
        lowest: dict[tuple[str, int], _WatchedBeacon] = {}
        for watched in self._watched.values():
            known = lowest.get((watched.job, watched.generation))
            if watched.snapshot.loss is not None and (known is None or watched.rank < known.rank):
                lowest[watched.job, watched.generation] = watched
        for watched in lowest.values():
            loss = watched.snapshot.loss
            if loss is not None and loss != watched.loss_reported:
                watched.loss_reported = loss
                yield RankLoss(watched.job, watched.generation, watched.rank, loss[0], loss_value(loss[1]))

    def arrived(self, readings: BeaconReadings) -> None:
        """Record beside each beacon how far its steps were reported: a restarted daemon continues there.

        If the daemon is killed between the reply and this, the next one reports the steps of one report twice.
        """
        for path, count in readings.seen:
            if Path(path).exists():
                try:
                    write_seen(path, count)
                except OSError as error:  # usually a full disk; a restarted daemon then reports some steps twice
                    _log.warning("reported_steps_not_stored", path=path, error=str(error))
        for key, watched in list(self._watched.items()):
            if watched.removed and not watched.waiting:
                del self._watched[key]

    def put_back(self, readings: BeaconReadings) -> None:
        """The report failed: its steps and times are due again."""
        for run in reversed(readings.steps):
            watched = self._watched.get((run.job, run.generation, run.rank))
            if watched is not None:
                watched.waiting.extendleft(
                    reversed([(run.first_step + i, at) for i, at in enumerate(run.completed_at)])
                )
                _drop_oldest(watched)
        for mark in readings.marks:
            watched = self._watched.get((mark.job, mark.generation, mark.rank))
            if watched is not None:
                watched.marks_reported = None
        for loss in readings.losses:
            watched = self._watched.get((loss.job, loss.generation, loss.rank))
            if watched is not None:
                watched.loss_reported = None

    def remove(self, job: str, *, before_generation: int | None = None) -> None:
        """Delete the beacon files of a job's dead workers, or only those of generations before one."""
        for watched in self._watched.values():
            older = before_generation is None or watched.generation < before_generation
            if watched.job == job and older and not watched.removed:
                watched.removed, watched.live = True, False
                watched.close()
                for suffix in ("", *_BESIDE):
                    Path(watched.path + suffix).unlink(missing_ok=True)

    def _now(self) -> tuple[int, float]:
        return int(self._clock.monotonic_s() * 1e9), self._clock.wall_s()

    def _read(self, watched: _WatchedBeacon) -> bool:
        now_ns, wall_s = self._now()

        def wall(moment_ns: int) -> float:
            return wall_s - (now_ns - moment_ns) / 1e9 if moment_ns else 0.0

        snapshot = self._look(watched)
        if snapshot is None:
            return False
        new = snapshot.steps_since(watched.count)
        watched.snapshot = snapshot
        watched.count = snapshot.step_count
        watched.waiting.extend((step, wall(at_ns)) for step, at_ns in new)
        _drop_oldest(watched)
        watched.marks = _marks(watched, wall)
        return bool(new) and snapshot.step_count - len(new) < EAGER_STEPS

    def _look(self, watched: _WatchedBeacon) -> BeaconSnapshot | None:
        """What the beacon shows; None if it cannot be opened, its script shortened it, or it says what cannot be."""
        now_ns = self._now()[0]
        try:
            if watched.reader is None:
                if now_ns / 1e9 < watched.retry_s:
                    return None
                watched.retry_s = now_ns / 1e9 + REOPEN_S
                watched.reader = BeaconReader(watched.path)
            snapshot = watched.reader.snapshot()
            if not snapshot.is_plausible(now_ns + _AHEAD_NS):
                raise ValueError("it says what cannot be")
        except (OSError, ValueError, StateVersionMismatch) as error:
            if not watched.trouble:
                _log.warning("beacon_unreadable", path=watched.path, error=str(error))
            watched.trouble = str(error) or "it cannot be read"
            return None
        watched.trouble = ""
        return snapshot


def _age_s(watched: _WatchedBeacon, now_ns: int, wall_s: float) -> float:
    """Seconds since the beacon last moved, or since the worker was started."""
    moved_ns = watched.snapshot.moved_ns
    return max(0.0, (now_ns - moved_ns) / 1e9 if moved_ns else wall_s - watched.spawned_at)


def _usual_s(snapshot: BeaconSnapshot) -> float:
    """Age in seconds beyond which a beacon counts as stalled."""
    return max(STANDS_AFTER_S, 2.0 * _step_s(snapshot)) if snapshot.moved_ns else STANDS_UNATTACHED_AFTER_S


def _stack_after_s(snapshot: BeaconSnapshot) -> float:
    step_s = _step_s(snapshot)
    makes_steps = step_s > 0.0 and snapshot.phase in (Phase.STEP, Phase.DATA)
    return max(STACK_AFTER_S, STACK_AFTER_STEPS * step_s) if makes_steps else STACK_APART_AFTER_S


def _step_s(snapshot: BeaconSnapshot) -> float:
    """The usual time between two steps in seconds; 0.0: not known."""
    gaps = sorted(later - earlier for (_, earlier), (_, later) in pairwise(snapshot.recent[-USUAL_STEPS - 1 :]))
    return gaps[len(gaps) // 2] / 1e9 if gaps else 0.0


def _marks(watched: _WatchedBeacon, wall: Callable[[int], float]) -> RankMarks:
    """The key times of a worker's life. A time that was converted before stays as it is: clocks get adjusted."""
    snapshot, before = watched.snapshot, watched.marks

    def moment(name: str, at_ns: int) -> float:
        return (getattr(before, name) if before else 0.0) or wall(at_ns)

    return RankMarks(
        job=watched.job,
        generation=watched.generation,
        rank=watched.rank,
        spawned_at=watched.spawned_at,
        attached_at=moment("attached_at", snapshot.attached_ns),
        restore_began_at=moment("restore_began_at", snapshot.restore_began_ns),
        restored_at=moment("restored_at", snapshot.restored_ns),
        first_step_at=moment("first_step_at", snapshot.first_step_ns),
        save_blocked_s=snapshot.save_blocked_ns / 1e9,
        data_wait_s=snapshot.data_wait_ns / 1e9,
    )


def _marks_are_due(watched: _WatchedBeacon, now_s: float) -> bool:
    """A new time is due at once. What grows with every save or batch is due every few seconds."""
    marks, reported = watched.marks, watched.marks_reported
    if marks == reported:
        return False
    if marks is None or reported is None or not watched.live:
        return True
    waits = {"save_blocked_s": reported.save_blocked_s, "data_wait_s": reported.data_wait_s}
    if msgspec.structs.replace(marks, **waits) != reported:
        return True
    return now_s - watched.marks_reported_s >= WAITS_EVERY_S


def _runs(watched: _WatchedBeacon, steps: Iterable[tuple[int, float]]) -> list[RankSteps]:
    """Put consecutive steps into one record; a script that skips steps makes several."""
    runs: list[tuple[int, list[float]]] = []
    for step, at in steps:
        if runs and step == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(at)
        else:
            runs.append((step, [at]))
    return [RankSteps(watched.job, watched.generation, watched.rank, first, tuple(at)) for first, at in runs]


def _at_most(waiting: deque[tuple[int, float]]) -> int:
    return min(len(waiting), STEPS_PER_REPORT)


def _drop_oldest(watched: _WatchedBeacon) -> None:
    lost = len(watched.waiting) - MAX_WAITING_STEPS
    if lost > 0:
        _log.warning("steps_not_reported", job=watched.job, rank=watched.rank, steps=lost)
        for _ in range(lost):
            watched.waiting.popleft()
