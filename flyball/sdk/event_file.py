"""The event file, which `flyball goodput` reads: written by the trainer itself, for runs without a supervisor.

Steps pay nothing for it: a thread reads the beacon twice a second, as a daemon would, and appends whole lines in one
write. So a kill -9 loses less than a second. A file that cannot be written costs a warning, and training goes on; the
lines are kept, up to a bound, and written later.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ckpt_engine.trainer.save_handle import NoProgress, SaveHandle, SaveProgress
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.events import Event, EventKind
from flyball.contracts.on_host import worker_env
from flyball.contracts.wire import encode
from flyball.sdk.beacon import RING_ENTRIES, BeaconReader, BeaconSnapshot, BeaconWriter
from flyball.sdk.event_generation import Entered, enter, launch_of
from flyball.sdk.worker_identity import WorkerIdentity

VARIABLE = "FLYBALL_EVENTS"
WORLD_FILE = "generations.jsonl"  # in a folder: events of the whole job

_PERIOD_S = 0.5
_SHORTEST_PERIOD_S = 0.05
_MAX_PENDING_LINES = 10_000
_MAX_MOMENTS = 10_000  # while the generation is not known
_MAX_NOTED = 4096  # between two flushes
_LOCK_WAIT_S, _LOCKED_LONG_S = 1.0, 10.0
_JOIN_S = 5.0

_PHASE_NAMES = {Phase.STARTING: "init", Phase.RESTORING: "restore"}  # the others are called as in the code
_HINTS: dict[int | None, str] = {
    errno.EWOULDBLOCK: "see who holds it (`lslocks`)",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
}
_FIRST_NUMBER = 1  # an epoch's steps begin with 0 or 1
_SLOW_TIERS = (Tier.DISK, Tier.PERSISTENT)

_Value: TypeAlias = str | int | float | bool | list[int | float | str] | None


class _Moment(NamedTuple):
    """Something that happened: exactly one of the fields below is set."""

    at_ns: int
    step: int = -1  # completed
    phase: Phase | None = None  # entered
    restored: Mapping[str, _Value] | None = None  # the event's data


_at_ns = attrgetter("at_ns")


class EventFile:
    """Writes one rank's events. `path` is a file, to which all ranks of a host may append, or a folder (it exists, or
    the path ends in `/`), in which every rank has its own file."""

    def __init__(self, path: str, identity: WorkerIdentity, beacon: BeaconWriter) -> None:
        self._me = identity
        self._reader = BeaconReader.of(beacon)
        self._clock = SystemClock()
        self._host_id = os.environ.get(worker_env.HOST_ID) or socket.gethostname()
        self._pid = os.getpid()
        self._warned: set[int | None] = set()  # error numbers
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._stopped = False
        self._closed = False
        self._period_s = _SHORTEST_PERIOD_S  # steps may be fast; it grows if they are not
        self._looked_ns = time.monotonic_ns()
        self._step_count = 0
        self._noted: deque[_Moment] = deque(maxlen=_MAX_NOTED)  # by the trainer, in monotonic time
        self._pending: deque[_Moment] = deque(maxlen=_MAX_MOMENTS)  # to be written, in wall-clock time
        self._saves: deque[SaveHandle] = deque(maxlen=_MAX_NOTED)  # begun, not yet known to be committed
        self._progress: SaveProgress = NoProgress()
        self._durable_step = -1  # written
        self._newest = _Moment(0)  # step of this generation that was written
        self._first_number = _FIRST_NUMBER  # the lowest step: an epoch may begin with it
        self._written_phase = beacon.current_phase
        beacon.on_phase = self._enter_phase
        self._written_marks: Mapping[str, _Value] = {}
        self._blocked_before_ns = 0  # in generations before this one
        folder = path.endswith("/") or Path(path).is_dir()
        rank_path = Path(path, f"rank-{identity.rank:05d}.jsonl") if folder else Path(path)
        self._own = _Appender(rank_path)
        self._world = _Appender(Path(path, WORLD_FILE)) if folder else self._own
        self._launch = launch_of(identity, os.environ, self._clock)
        self._entered: Entered | None = None  # unknown while the file cannot be read
        self._awaits_first_step = False
        self._unknown_since_s = time.monotonic()
        self._flush()
        self._thread = threading.Thread(target=self._run, name="flyball-events", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def restored(self, step: int, tier: Tier | None) -> None:
        """Note that the state of `step` was restored from `tier`."""
        data: dict[str, _Value] = {"step": step} if tier is None else {"step": step, "source_tier": tier}
        self._noted.append(_Moment(time.monotonic_ns(), restored=data))

    def saving(self, handle: SaveHandle) -> None:
        """Note that a save was begun, unless the handle is over already."""
        if not handle.is_over:
            self._progress = handle.progress
            self._saves.append(handle)

    def stop(self) -> None:
        """Write everything up to now, and end the thread, so that the engine may be closed."""
        if not self._stopped:
            self._stopped = True
            atexit.unregister(self._at_exit)
            self._closing.set()
            self._thread.join(_JOIN_S)
            self._flush_last()

    def close(self) -> None:
        """The job is done: write the rest, and in rank 0 the end of the job. Later calls do nothing."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        if self._flush_last() and self._entered is not None and self._me.rank == 0:
            data: Mapping[str, _Value] = {"outcome": "succeeded"}
            ended = Event(self._clock.wall_s(), EventKind.JOB_ENDED, self._me.job, data=data)
            self._write(self._world, [ended])
        self._reader.close()

    def _at_exit(self) -> None:
        """The process ends without `close`: the workers stopped."""
        if os.getpid() == self._pid:
            self.stop()
            if self._entered is not None and not self._thread.is_alive():
                self._write(self._world, [self._event(EventKind.WORKERS_STOPPED, self._clock.wall_s(), {})])

    def _flush_last(self) -> bool:
        """False if a write hangs; training must not hang with it."""
        if self._thread.is_alive():
            return False
        self._flush()
        return True

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            self._flush()

    def _enter(self) -> None:
        """Learn from the file which generation this is. Until it can be read, write nothing and guess nothing."""
        try:
            self._entered = enter(self._world.path, self._launch, partial(self._write, self._world), _LOCK_WAIT_S)
        except TimeoutError as locked:
            if self._stopped or time.monotonic() - self._unknown_since_s >= _LOCKED_LONG_S:
                self._warn(self._world, locked)
            return
        except OSError as error:
            self._warn(self._world, error)
            return
        # Without an incident the steps alone show the first one, if they are in the same file.
        in_same_file = self._world is self._own
        self._awaits_first_step = self._entered.began and (not in_same_file or bool(self._entered.incident_id))

    # --- news ---

    def _flush(self) -> None:
        with self._flushing:
            snapshot = self._look()
            if self._entered is None:
                self._enter()
            if self._entered is not None:
                self._write_news(snapshot)

    def _enter_phase(self, at_ns: int, phase: Phase) -> None:
        self._noted.append(_Moment(at_ns, phase=phase))

    def _look(self) -> BeaconSnapshot:
        """Take everything that happened up to now, in order. Leave newer moments for the next time: earlier ones may
        not show yet."""
        until_ns, wall_ns = time.monotonic_ns(), self._wall_ns()
        snapshot = self._reader.snapshot()
        new = snapshot.steps_since(self._step_count)
        moments = [_Moment(ns + wall_ns, step) for step, ns in new if ns <= until_ns]
        count, self._step_count = snapshot.step_count - self._step_count, snapshot.step_count - len(new) + len(moments)
        self._period_s = next_period_s(self._period_s, count, (until_ns - self._looked_ns) / 1e9)
        self._looked_ns = until_ns
        while self._noted and self._noted[0].at_ns <= until_ns:
            moment = self._noted.popleft()
            moments.append(moment._replace(at_ns=moment.at_ns + wall_ns))
        self._pending.extend(sorted(moments, key=_at_ns))
        return snapshot

    def _write_news(self, snapshot: BeaconSnapshot) -> None:
        events = [*self._marks(snapshot), *self._saved()]
        steps: list[_Moment] = []
        while self._pending and self._entered is not None:
            moment = self._pending[0]
            if self._goes_back(moment):
                self._write(self._own, [*events, *self._steps(steps)])
                events, steps = [], []
                self._blocked_before_ns = snapshot.save_blocked_ns
                self._roll_back(moment)
                continue
            self._pending.popleft()
            at = _seconds(moment.at_ns)
            if moment.phase is not None:
                if moment.phase is not self._written_phase:
                    self._written_phase = moment.phase
                    name = _PHASE_NAMES.get(moment.phase, moment.phase.name.lower())
                    events.append(self._event(EventKind.PHASE, at, {"phase": name}))
            elif moment.restored is not None:
                events.append(self._event(EventKind.RESTORED, at, moment.restored))
            else:
                steps.append(moment)
                self._newest = moment
                self._first_number = min(self._first_number, moment.step)
                if self._awaits_first_step:
                    self._awaits_first_step = False
                    self._write(self._world, [self._entered.first_step(self._launch, at)])
        self._write(self._own, [*events, *self._steps(steps)])

    def _goes_back(self, moment: _Moment) -> bool:
        """Whether steps are about to be recomputed: a state is restored after steps were completed, or a step is lower
        than the one before (a script may not report its restore). A step with the lowest number does not count: it
        begins an epoch of a script that numbers each epoch's steps."""
        is_lower = self._first_number < moment.step < self._newest.step
        return self._newest.step >= 0 and (moment.phase is Phase.RESTORING or is_lower)

    def _roll_back(self, moment: _Moment) -> None:
        """Begin or join the next generation, as after a restart: the steps to come are recomputed just the same."""
        began = self._newest if moment.phase is None else moment
        self._launch = replace(self._launch, rollback=self._launch.rollback + 1, spawned_at=_seconds(began.at_ns))
        self._newest = _Moment(0)
        self._entered, self._unknown_since_s = None, time.monotonic()
        self._enter()

    def _marks(self, snapshot: BeaconSnapshot) -> Iterator[Event]:
        reached = {
            "attached_at": snapshot.attached_ns,
            "restore_began_at": snapshot.restore_began_ns,
            "restored_at": snapshot.restored_ns,
            "first_step_at": snapshot.first_step_ns,
        }
        if self._launch.rollback:  # the process started long ago, and phases show the rest
            reached = {}
        blocked_ns = snapshot.save_blocked_ns - self._blocked_before_ns
        known = {**dict.fromkeys((key for key, ns in reached.items() if ns), True), "blocked": blocked_ns}
        if known != self._written_marks:
            self._written_marks = known
            wall_ns = self._wall_ns()
            data: dict[str, _Value] = {key: _seconds(ns + wall_ns) for key, ns in reached.items() if ns}
            if not self._launch.rollback:
                data["spawned_at"] = self._launch.spawned_at
            data["save_blocked_s"] = blocked_ns / 1e9
            yield self._event(EventKind.RANK_MARKS, self._clock.wall_s(), data)

    def _saved(self) -> Iterator[Event]:
        """Saves that were committed since, and the newest that reached a disk or a store."""
        while self._saves and ((is_there := self._saves[0].replicated.done) or self._saves[0].is_over):
            handle = self._saves.popleft()
            if is_there:
                yield self._saved_to(Tier.MEMORY, handle.step)
        durable_step = self._progress.durable_step
        if durable_step > self._durable_step:
            self._durable_step = durable_step
            tiers = [tier for tier in _SLOW_TIERS if self._me.checkpoint.policy(tier).is_on]
            yield self._saved_to(tiers[0] if len(tiers) == 1 else "", durable_step)

    def _saved_to(self, tier: str, step: int) -> Event:
        return self._event(EventKind.CHECKPOINT_SAVED, self._clock.wall_s(), {"step": step, "tier": tier})

    def _steps(self, steps: Sequence[_Moment]) -> Iterator[Event]:
        if steps:
            cuts = [place for place, (one, next_one) in enumerate(pairwise(steps), 1) if next_one.step != one.step + 1]
            for first, end in pairwise([0, *cuts, len(steps)]):
                completed_at: list[int | float | str] = [_seconds(moment.at_ns) for moment in steps[first:end]]
                data: dict[str, _Value] = {"first_step": steps[first].step, "completed_at": completed_at}
                yield self._event(EventKind.STEPS, self._clock.wall_s(), data)

    def _wall_ns(self) -> int:
        """Wall clock minus monotonic clock: of three readings, the one least held up."""
        readings = []
        for _ in range(3):
            before_ns = time.monotonic_ns()
            wall_ns = round(self._clock.wall_s() * 1e9)
            readings.append((time.monotonic_ns() - before_ns, wall_ns - before_ns))
        return min(readings)[1]

    def _event(self, kind: EventKind, at: float, data: Mapping[str, _Value]) -> Event:
        generation = -1 if self._entered is None else self._entered.generation
        return Event(at, kind, self._me.job, generation, self._me.rank, self._host_id, data=data)

    # --- writing ---

    def _write(self, to: _Appender, events: Sequence[Event]) -> None:
        try:
            to.write(map(_line, events))
        except OSError as error:
            self._warn(to, error)

    def _warn(self, to: _Appender, error: OSError) -> None:
        if error.errno not in self._warned:
            self._warned.add(error.errno)
            sys.stderr.write(
                f"flyball: the event file {to.path} cannot be written: {error.strerror or error}. Training goes on. "
                f"Next step: {_HINTS.get(error.errno, 'fix that')}, or name another place with {VARIABLE}.\n"
            )


class _Appender:
    """Appends whole lines to a file. For one thread at a time; other processes may append as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: deque[bytes] = deque(maxlen=_MAX_PENDING_LINES)
        self._descriptor = -1

    def write(self, lines: Iterator[bytes]) -> None:
        """Append `lines`, after those that could not be written before. Raises OSError, and then keeps them all."""
        self.pending.extend(lines)
        if not self.pending:
            return
        if self._descriptor < 0:
            self._open()
        data = (b"\n" if self._ends_within_a_line() else b"") + b"".join(self.pending)
        left = len(data) - os.write(self._descriptor, data)
        if left == 0:
            self.pending.clear()
            return
        whole: deque[bytes] = deque(maxlen=_MAX_PENDING_LINES)
        for line in reversed(self.pending):
            if left > 0:
                whole.appendleft(line)
                left -= len(line)
        self.pending = whole
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _ends_within_a_line(self) -> bool:
        """Whether some writer stopped in the middle of a line: the disk was full, or it was killed. If it is writing
        right now, a blank line does no harm."""
        size_bytes = os.fstat(self._descriptor).st_size
        return size_bytes > 0 and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n"


def next_period_s(period_s: float, step_count: int, elapsed_s: float) -> float:
    """The time until the next flush, after `step_count` steps in `elapsed_s` (may exceed the period on a busy machine).

    It is half the time in which the beacon's ring fills up, so shorter while steps are fast. Steps that are too fast
    even for the shortest period are written with gaps, because flushing all the time would slow them down."""
    steps_per_s = step_count / max(elapsed_s, _SHORTEST_PERIOD_S)
    if steps_per_s * _SHORTEST_PERIOD_S >= RING_ENTRIES:
        return _PERIOD_S
    half_full_s = RING_ENTRIES / 2 / max(steps_per_s, 1.0)
    return max(_SHORTEST_PERIOD_S, min(half_full_s, 2 * period_s, _PERIOD_S))


def _line(event: Event) -> bytes:
    return encode(event) + b"\n"


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)
