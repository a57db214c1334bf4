"""The beacon: a small shared-memory record per rank. The trainer writes it, the host daemon reads it.

A step costs the trainer one clock read and three stores: no lock, no system call. All words have 8 bytes, so none is
ever half written. Reading in between is harmless: a ring entry is stored before the count that makes it visible, and
readers leave out entries that the writer may be overwriting.

Only the trainer maps the file. The daemon reads it by system calls: a script may shorten its beacon, and a mapping of
it would then end the daemon by SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from flyball.contracts.cluster import Phase
from flyball.contracts.errors import MemoryTooSmall, StateVersionMismatch
from flyball.contracts.identity import MAX_STEP
from flyball.worker_files import open_worker_file, read_whole

BEACON_BYTES = 8192  # two pages: 32 words, then the ring
RING_ENTRIES = 256

_MAGIC = int.from_bytes(b"FLYBEAC1", "little")  # the last character is the version of the layout
_WORD_PHASE = 1
_WORD_PHASE_SINCE_NS = 2
_WORD_STEP_COUNT = 3
_WORD_SAVE_BLOCKED_NS = 4
_WORD_PID = 5
_WORD_DATA_WAIT_NS = 6
CLAIM_WORDS = (_WORD_PID, 7)  # the process that is the rank: its pid, and when it began. See `rank_claim`
_WORD_MARKS = 8
# Two places for (step, loss), written alternately, and how many losses were written. Releases before losses have zeros
# here, which read as "none yet", so the layout keeps its version.
_WORD_COMPUTE_NS = 12  # until a gradient was ready, without waiting for other ranks; and for how many steps
_WORD_COMPUTED_STEPS = 13
SAID_WORD = 14  # whether a child of the rank has said that it is one
_WORD_LOSS_COUNT = 16
_WORD_LOSSES = 18
_WORD_RING = 32
_HEAD_BYTES = 8 * _WORD_RING
_MASK = RING_ENTRIES - 1
_WORD, _FLOAT = struct.Struct("=q"), struct.Struct("=d")
_READS = 4  # of a ring that was overwritten meanwhile; one is enough unless the reader is held up


class Mark(IntEnum):
    """Moments of a worker's life, in order."""

    ATTACHED = 0
    RESTORE_BEGAN = 1
    RESTORED = 2
    FIRST_STEP = 3


def create_beacon(path: str) -> None:
    """Make a new beacon file (mode 0600), replacing an old one. Raises MemoryTooSmall if there is no room."""
    Path(path).unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            empty = _MAGIC.to_bytes(8, "little").ljust(BEACON_BYTES, b"\0")
            # Written, not only truncated to size: a missing page is an error here instead of a SIGBUS later.
            if os.write(descriptor, empty) != BEACON_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        Path(path).unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise MemoryTooSmall(
            f"There is no room for a beacon of {BEACON_BYTES} bytes at {path}: {error.strerror}.",
            hint="free space on that file system, or set FLYBALL_SHM_DIR to a larger one",
        ) from error


def _open(path: str, flags: int) -> int:
    descriptor = open_worker_file(path, flags)
    if os.fstat(descriptor).st_size == BEACON_BYTES and read_whole(descriptor, 8, 0) == _MAGIC.to_bytes(8, "little"):
        return descriptor
    os.close(descriptor)
    raise StateVersionMismatch(
        f"{path} is not a beacon of this version.", hint="run the same release of Flyball in the daemon and the job"
    )


def _map(path: str) -> mmap.mmap:
    descriptor = _open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, BEACON_BYTES)
    finally:
        os.close(descriptor)


class BeaconWriter:
    """The trainer's side. Without a path it writes to private memory, at the same cost."""

    def __init__(self, path: str | None) -> None:
        self._mapping = _map(path) if path else mmap.mmap(-1, BEACON_BYTES)
        self._words = memoryview(self._mapping).cast("q")
        self._floats = memoryview(self._mapping).cast("d")
        self._count = self._words[_WORD_STEP_COUNT]
        self._words[_WORD_PID] = os.getpid()
        self._gradient_ns = 0  # when the watched gradient was last ready; 0: not since the last step
        self._blocked_ns = 0  # the total at the last step
        self._only_trains = False  # since the last step
        self.on_phase: Callable[[int, Phase], object] | None = None
        """Called with the time (ns) and the phase, whenever one is entered."""

    def step(self, step: int) -> None:
        """Report that step `step` is complete."""
        count = self._count
        words = self._words
        now_ns = time.monotonic_ns()
        if self._gradient_ns:
            self._add_compute(words[_WORD_RING + 2 * ((count - 1) & _MASK) + 1])
        entry = _WORD_RING + 2 * (count & _MASK)
        words[entry] = step
        words[entry + 1] = now_ns
        count += 1
        words[_WORD_STEP_COUNT] = self._count = count
        if count == 1:
            self._first_step()

    def gradient_ready(self) -> None:
        """The gradient of the watched parameter is ready: this rank has computed (nearly) all that it does before it
        waits for the other ranks."""
        self._gradient_ns = time.monotonic_ns()

    def _add_compute(self, stepped_ns: int) -> None:
        """Count the time from the last step, at `stepped_ns`, until the gradient was ready. Leaves out waits for saves,
        and steps between which the rank did something else."""
        words, gradient_ns, self._gradient_ns = self._words, self._gradient_ns, 0
        blocked_ns = words[_WORD_SAVE_BLOCKED_NS]
        if self._only_trains:
            words[_WORD_COMPUTE_NS] += max(0, gradient_ns - stepped_ns - (blocked_ns - self._blocked_ns))
            words[_WORD_COMPUTED_STEPS] += 1
        self._blocked_ns, self._only_trains = blocked_ns, True

    def loss(self, step: int, value: float) -> None:
        """Report the loss of a step. Leaves alone the place that readers look at."""
        words = self._words
        count = words[_WORD_LOSS_COUNT]
        place = _WORD_LOSSES + 2 * (count & 1)
        words[place] = step
        self._floats[place + 1] = value
        words[_WORD_LOSS_COUNT] = count + 1

    def _first_step(self) -> None:
        self.mark(Mark.FIRST_STEP)
        if self.current_phase is Phase.STARTING:  # the script never called restore
            self.phase(Phase.STEP)

    def phase(self, phase: Phase) -> None:
        """Enter a phase."""
        words, now_ns = self._words, time.monotonic_ns()
        if words[_WORD_PHASE] == Phase.DATA:
            words[_WORD_DATA_WAIT_NS] += now_ns - words[_WORD_PHASE_SINCE_NS]
        words[_WORD_PHASE_SINCE_NS] = now_ns
        words[_WORD_PHASE] = phase
        self._only_trains &= phase in (Phase.STEP, Phase.DATA)
        if self.on_phase is not None:
            self.on_phase(now_ns, phase)

    @property
    def current_phase(self) -> Phase:
        return Phase(self._words[_WORD_PHASE])

    def mark(self, mark: Mark) -> None:
        """Store the time of a moment; only the first call counts."""
        if not self._words[_WORD_MARKS + mark]:
            self._words[_WORD_MARKS + mark] = time.monotonic_ns()

    def add_save_blocked(self, blocked_ns: int) -> None:
        """Add time for which a save held up training."""
        self._words[_WORD_SAVE_BLOCKED_NS] += blocked_ns

    def close(self) -> None:
        """Unmap the beacon. Later calls go to private memory."""
        words, floats, mapping = self._words, self._floats, self._mapping
        self._mapping = mmap.mmap(-1, BEACON_BYTES)
        self._words = memoryview(self._mapping).cast("q")
        self._floats = memoryview(self._mapping).cast("d")
        words.release()
        floats.release()
        mapping.close()


@dataclass(frozen=True, slots=True)
class BeaconSnapshot:
    """The content of a beacon at one moment. Times are nanoseconds of the machine's monotonic clock, 0 = not yet."""

    phase: Phase
    phase_since_ns: int
    step: int  # newest completed, -1 before the first
    moved_ns: int  # when a step or a phase last changed
    step_count: int  # steps completed since the beacon was made
    pid: int
    attached_ns: int
    restore_began_ns: int
    restored_ns: int
    first_step_ns: int
    save_blocked_ns: int
    data_wait_ns: int  # in the phase DATA, without the wait in progress
    recent: tuple[tuple[int, int], ...]  # (step, completed at ns) of the newest steps, oldest first
    loss: tuple[int, float] | None = None  # (step, value) of the newest
    compute_ns: int = 0  # total of `computed_steps`, until a gradient was ready
    computed_steps: int = 0

    def is_plausible(self, now_ns: int) -> bool:
        """Whether a rank can have been so far by this time of the monotonic clock. A script may write anything here;
        what nobody can have done must get into no report, as a receiver refuses the whole of that."""
        marks = (self.attached_ns, self.restore_began_ns, self.restored_ns, self.first_step_ns)
        totals = (self.save_blocked_ns, self.data_wait_ns, self.compute_ns)
        times = (self.phase_since_ns, self.moved_ns, *marks, *totals, *(at_ns for _, at_ns in self.recent))
        steps = (*(step for step, _ in self.recent), *(self.loss or (0,))[:1])
        return (
            all(0 <= time_ns <= now_ns for time_ns in times)
            and all(-1 <= step <= MAX_STEP for step in steps)
            and 0 <= self.step_count <= MAX_STEP
            and 0 <= self.computed_steps <= MAX_STEP
        )

    def steps_since(self, count: int) -> list[tuple[int, int]]:
        """The (step, ns) completed after the first `count`. Pass the previous snapshot's `step_count` to see every step
        exactly once, unless more than RING_ENTRIES - 1 passed in between."""
        missing = self.step_count - count
        return list(self.recent[-missing:]) if missing > 0 else []


BEFORE_THE_FIRST: Final = BeaconSnapshot(Phase.STARTING, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())
"""Of a beacon that nobody has written to, or could read, so far."""


class BeaconReader:
    """The daemon's side."""

    def __init__(self, path: str) -> None:
        """Raises OSError, StateVersionMismatch."""
        self._descriptor = _open(path, os.O_RDONLY)
        self._words: memoryview | None = None

    @classmethod
    def of(cls, writer: BeaconWriter) -> BeaconReader:
        """A reader in the writer's own process, of the same memory. Close it before the writer."""
        reader = cls.__new__(cls)
        reader._words = memoryview(writer._mapping).cast("q")
        return reader

    def snapshot(self) -> BeaconSnapshot:
        """Read everything, as consistently as it matters. Raises ValueError if somebody shortened or garbled it."""
        count, recent = self._read_ring()
        words = self._read(0, _HEAD_BYTES)
        phase_since_ns = words[_WORD_PHASE_SINCE_NS]
        marks = words[_WORD_MARKS : _WORD_MARKS + len(Mark)].tolist()
        step, stepped_ns = recent[-1] if recent else (-1, 0)
        return BeaconSnapshot(
            phase=Phase(words[_WORD_PHASE]),
            phase_since_ns=phase_since_ns,
            step=step,
            moved_ns=max(stepped_ns, phase_since_ns, *marks),
            step_count=count,
            pid=words[_WORD_PID],
            attached_ns=marks[Mark.ATTACHED],
            restore_began_ns=marks[Mark.RESTORE_BEGAN],
            restored_ns=marks[Mark.RESTORED],
            first_step_ns=marks[Mark.FIRST_STEP],
            save_blocked_ns=words[_WORD_SAVE_BLOCKED_NS],
            data_wait_ns=words[_WORD_DATA_WAIT_NS],
            recent=recent,
            loss=self._read_loss(words),
            compute_ns=words[_WORD_COMPUTE_NS],
            computed_steps=words[_WORD_COMPUTED_STEPS],
        )

    def _read_loss(self, words: memoryview) -> tuple[int, float] | None:
        """The newest (step, loss); None if there is none, or they come faster than they can be read."""
        for _ in range(_READS):
            count = words[_WORD_LOSS_COUNT]
            if not count:
                return None
            newer = self._read(0, _HEAD_BYTES)
            place = _WORD_LOSSES + 2 * ((count - 1) & 1)
            step, bits = newer[place], newer[place + 1]
            words = self._read(0, _HEAD_BYTES)
            if words[_WORD_LOSS_COUNT] == count:
                return step, _FLOAT.unpack(_WORD.pack(bits))[0]
        return None

    def _read_ring(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The number of completed steps, and the newest of them."""
        count = 0
        recent: tuple[tuple[int, int], ...] = ()
        for _ in range(_READS):
            count = self._read(8 * _WORD_STEP_COUNT, 8)[0]
            ring = self._read(_HEAD_BYTES, 16 * RING_ENTRIES).tolist()
            newer_count = self._read(8 * _WORD_STEP_COUNT, 8)[0]
            # The writer may be at entry `newer_count`, in whose place entry `newer_count - RING_ENTRIES` was.
            oldest = max(0, newer_count - RING_ENTRIES + 1)
            places = (2 * (i & _MASK) for i in range(oldest, count))
            recent = tuple((ring[place], ring[place + 1]) for place in places)
            if recent or not count:
                break
        return count, recent

    def _read(self, offset: int, size_bytes: int) -> memoryview:
        """Words of the beacon. One call copies them in no order that could be relied on: what must be read before
        something else is read by a call of its own."""
        if self._words is not None:
            return self._words[offset // 8 : (offset + size_bytes) // 8]
        data = read_whole(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise ValueError(f"the beacon ends before byte {offset + size_bytes}")
        return memoryview(data).cast("q")

    def close(self) -> None:
        """Take no snapshots after it."""
        if self._words is not None:
            self._words.release()
        else:
            os.close(self._descriptor)
