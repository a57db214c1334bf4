"""Finds out from /proc, without the script's help, what workers do while their beacons stand still.

Only ranks that have not moved for longer than usual are looked at, so steps pay nothing for it. A worker means all
processes of its session and their descendants: data loaders and subprocesses work for it too.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flyball.contracts.cluster import DUE_SLEEP, Activity
from host_daemon.kernel.system_calls import SLEEPS, in_call, is_reading_input, sleeps_for_s
from host_daemon.kernel.worker_reads import NotReadable, WorkerReads

WINDOW_S = 4.0  # a worker without activity for this long counts as inactive
OFTEN_S, SELDOM_S = 0.4, 2.0  # between looks at a worker: in the first seconds, and later
EARLY_S = 10.0
TREE_S = 5.0  # between scans for a worker's processes
CPU_SHARE = 0.02  # of a core; background threads (heartbeats, watchdogs, progress bars) stay below
IO_BYTES_PER_S = 32 << 10
SOON_S = 300.0  # a sleep that ends by then is not waited for in vain: as long as ranks have that are all idle
SWITCHES_PER_S = 0.5  # of the main thread: it makes progress, if only from wait to wait

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READ_WITHIN_S = 0.5
_AWAY = (FileNotFoundError, ProcessLookupError)

Key = tuple[str, int, int]  # job, generation, rank
UsesGpu = Callable[[Iterable[int]], bool | None]  # for these pids; None: one has a GPU whose use is unknown


class StalledWorker(NamedTuple):
    """A worker whose beacon stands still."""

    key: Key
    pid: int


class Seen(NamedTuple):
    """A worker's activity, since when (monotonic), and the system call in which an idle one waits."""

    activity: Activity
    since_s: float
    place: str = ""


class _Sample(NamedTuple):
    at_s: float
    cpu_s: float
    io_bytes: int
    switches: int
    pids: frozenset[int]


class _Process(NamedTuple):
    state: str
    parent: int
    session: int
    cpu_s: float  # including children that were waited for


@dataclass(slots=True)
class _WatchedProcess:
    began_s: float
    active_s: float  # when it was last active
    looked_s: float = 0.0
    seen: Seen | None = None
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=32))


class ActivityWatch:
    """Use it from one thread at a time."""

    def __init__(self, uses_gpu: UsesGpu) -> None:
        self._uses_gpu = uses_gpu
        self._reads = WorkerReads()
        self._wakes_s: dict[StalledWorker, float] = {}  # when the first sleep ends since it is idle
        self._watched: dict[tuple[Key, int], _WatchedProcess] = {}
        self._trees: dict[int, frozenset[int]] = {}
        self._trees_read_s = -TREE_S

    async def watch(self, standing: Sequence[StalledWorker], now_s: float) -> dict[Key, Seen]:
        """As `look`, in threads: many processes take milliseconds. A sleep that ends soon is known as such; one sleep
        after the other is not."""
        seen = await asyncio.to_thread(self.look, standing, now_s)
        idle = [worker for worker in standing if seen[worker.key].activity is Activity.IDLE]
        self._wakes_s = {worker: at_s for worker, at_s in self._wakes_s.items() if worker in idle}
        asleep = [worker for worker in idle if seen[worker.key].place in SLEEPS]
        due = await asyncio.gather(*(self._is_due(worker, now_s) for worker in asleep))
        soon = {worker.key for worker, is_due in zip(asleep, due, strict=True) if is_due}
        return {key: found._replace(place=DUE_SLEEP) if key in soon else found for key, found in seen.items()}

    async def _is_due(self, worker: StalledWorker, now_s: float) -> bool:
        if worker not in self._wakes_s:
            try:
                read = functools.partial(sleeps_for_s, worker.pid)
                self._wakes_s[worker] = now_s + await self._reads.read(worker.pid, read, timeout_s=_READ_WITHIN_S)
            except NotReadable:
                return False
        return self._wakes_s[worker] - SOON_S <= now_s <= self._wakes_s[worker] + WINDOW_S

    def look(self, standing: Sequence[StalledWorker], now_s: float) -> dict[Key, Seen]:
        """Return each worker's activity. Workers that are no longer among them have moved, and are forgotten."""
        here = {(worker.key, worker.pid) for worker in standing}
        self._watched = {key: watched for key, watched in self._watched.items() if key in here}
        found: dict[Key, Seen] = {}
        for worker in standing:
            watched = self._watched.setdefault((worker.key, worker.pid), _WatchedProcess(now_s, now_s))
            often_s = OFTEN_S if now_s - watched.began_s < EARLY_S else SELDOM_S
            if watched.seen is None or now_s - watched.looked_s >= often_s:
                watched.looked_s = now_s
                self._read_trees([other.pid for other in standing], now_s)
                watched.seen = self._look(watched, worker.pid, now_s)
            found[worker.key] = watched.seen
        return found

    def _look(self, watched: _WatchedProcess, pid: int, now_s: float) -> Seen:
        main = _read(pid)
        if main is None:
            return Seen(Activity.UNKNOWN, now_s)
        if main.state in "Tt":
            return self._held(watched, Activity.STOPPED if main.state == "T" else Activity.TRACED, now_s)
        processes = {pid: main} | {p: found for p in self._trees.get(pid, ()) if (found := _read(p)) is not None}
        try:
            activity = self._working(watched, pid, processes, now_s)
        except PermissionError:  # it changed its user, or made itself unreadable
            return Seen(Activity.UNKNOWN, now_s)
        if activity is not None:
            watched.active_s = now_s
        if activity is not None or now_s - watched.active_s < WINDOW_S:
            return Seen(activity or Activity.UNKNOWN, now_s)
        return _waiting(pid, processes, watched.active_s)

    def _working(
        self, watched: _WatchedProcess, pid: int, processes: dict[int, _Process], now_s: float
    ) -> Activity | None:
        """ACTIVE; UNKNOWN if it has a GPU whose use is unknown; None if inactive. Raises PermissionError."""
        sample = _sampled(pid, processes, now_s)
        before = next((s for s in reversed(watched.samples) if now_s - s.at_s >= WINDOW_S), None)
        newest = watched.samples[-1] if watched.samples else sample
        watched.samples.append(sample)
        is_running = any(process.state == "R" for process in processes.values())
        if is_running or newest.pids != sample.pids or (before is not None and _works(before, sample)):
            return Activity.ACTIVE
        return {True: Activity.ACTIVE, None: Activity.UNKNOWN, False: None}[self._uses_gpu(processes)]

    def _held(self, watched: _WatchedProcess, activity: Activity, now_s: float) -> Seen:
        watched.samples.clear()  # inactivity while it cannot run means nothing
        watched.active_s = now_s
        is_new = watched.seen is None or watched.seen.activity is not activity
        return Seen(activity, now_s if is_new or watched.seen is None else watched.seen.since_s)

    def _read_trees(self, roots: Sequence[int], now_s: float) -> None:
        """Find the other processes of each root: those of its session, and descendants."""
        if now_s - self._trees_read_s < TREE_S and all(root in self._trees for root in roots):
            return
        self._trees_read_s = now_s
        children: dict[int, list[int]] = {}
        sessions: dict[int, set[int]] = {root: set() for root in roots}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and (found := _read(int(entry.name))) is not None and found.state not in "ZX":
                children.setdefault(found.parent, []).append(int(entry.name))
                if found.session in sessions:
                    sessions[found.session].add(int(entry.name))
        self._trees = {root: frozenset(_reached(sessions[root] | {root}, children) - {root}) for root in roots}


def _reached(begin: set[int], children: dict[int, list[int]]) -> set[int]:
    found, new = set(begin), list(begin)
    while new:
        new = [child for parent in new for child in children.get(parent, ()) if child not in found]
        found.update(new)
    return found


def _waiting(pid: int, processes: dict[int, _Process], since_s: float) -> Seen:
    """Find out what an inactive worker waits for."""
    if is_reading_input(pid):
        return Seen(Activity.READS_INPUT, since_s)
    if any(process.state == "D" for process in processes.values()) or _has_blocked_thread(pid):
        return Seen(Activity.BLOCKED, since_s)
    return Seen(Activity.IDLE, since_s, in_call(pid))


def _sampled(pid: int, processes: dict[int, _Process], now_s: float) -> _Sample:
    return _Sample(
        at_s=now_s,
        cpu_s=sum(process.cpu_s for process in processes.values()),
        io_bytes=sum(_io_bytes(process) for process in processes),
        switches=_switches(pid),
        pids=frozenset(processes),
    )


def _works(before: _Sample, now: _Sample) -> bool:
    span_s = now.at_s - before.at_s
    return (
        abs(now.cpu_s - before.cpu_s) > CPU_SHARE * span_s
        or abs(now.io_bytes - before.io_bytes) > IO_BYTES_PER_S * span_s
        or now.switches - before.switches > SWITCHES_PER_S * span_s
    )


def _read(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except _AWAY:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
    ticks = sum(map(int, fields[11:15]))
    return _Process(fields[0], int(fields[1]), int(fields[3]), ticks / _TICKS_PER_S)


def _io_bytes(pid: int) -> int:
    """Bytes read and written so far, from disks or not. Raises PermissionError."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except _AWAY:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _switches(pid: int) -> int:
    """How often the main thread has gone to sleep so far."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except _AWAY:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("voluntary_ctxt")), 0)


def _has_blocked_thread(pid: int) -> bool:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except _AWAY:
        return False
    for thread in threads:
        try:
            text = (thread / "stat").read_text(errors="replace")
        except _AWAY:
            continue
        if text[text.rindex(")") + 2] == "D":
            return True
    return False
