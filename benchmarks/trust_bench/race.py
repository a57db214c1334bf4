"""One run of one launcher: two hosts and a spare on this machine, the faults at fixed moments, and what was measured.

All is read from the ranks' loss lines, as they appear: no launcher's own log or count is asked.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from goodput_bench.faults import HANG, RAISE

from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from simulator.inject.processes import environment_of, own_processes
from trust_bench.peers import ENVIRONMENT, Course, Peer

MARK = "TRUST_RACE"  # folder of the run, in the environment of all its processes
HOST = "TRUST_RACE_HOST"
RANKS = 2
START_DEADLINE_S = 240.0
RECOVERY_DEADLINE_S = 180.0
LOOK_S = 0.005
CALM_S = 8.0  # of training before each fault
FAULTS = ("kill", "exception", "hang", "host")
# Student's t for 1, 2, ... degrees of freedom, at 97.5 %.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_SIGNALS = {"kill": signal.SIGKILL, "exception": RAISE, "hang": HANG}


class Recovery(msgspec.Struct, frozen=True):
    """One fault. `next_step_s`: from it to the next step of all ranks; None: there was none in time."""

    fault: str
    next_step_s: float | None
    lost_steps: int | None
    why: str = ""


class RaceRun(msgspec.Struct, frozen=True):
    """`elapsed_s`: from the first step to the last one that was waited for."""

    peer: str
    repetition: int
    start_s: float  # from the launch to the first step
    recoveries: tuple[Recovery, ...]
    elapsed_s: float
    steps_kept: int
    step_s: float  # median without a fault
    load_average_1m: float


class RaceFailed(Exception):
    """A run could not be measured."""


class _Track:
    """Steps that all ranks completed, with the moment at which that was seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = dict.fromkeys(range(RANKS), 0)
        self._seen: dict[int, dict[int, tuple[float, int]]] = {rank: {} for rank in range(RANKS)}
        self.pids = dict.fromkeys(range(RANKS), 0)  # that wrote the newest line
        self.done: list[tuple[float, int, tuple[int, ...]]] = []  # moment, step, pids

    def pull(self) -> None:
        for rank, offset in self._offsets.items():
            path = self._folder / f"rank{rank}.txt"
            try:
                if path.stat().st_size == offset:
                    continue
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError:
                continue
            data = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] += len(data)
            now_s = time.monotonic()
            for line in data.decode().splitlines():
                step, _, pid = line.split()
                self.pids[rank] = int(pid)
                self._seen[rank][int(step)] = (now_s, int(pid))
                self._complete(int(step))

    def _complete(self, step: int) -> None:
        found = [self._seen[rank].get(step) for rank in range(RANKS)]
        if any(one is None for one in found):
            return
        moments, pids = zip(*(one for one in found if one is not None), strict=True)
        if not self.done or self.done[-1][2] == pids or not set(self.done[-1][2]) & set(pids):
            self.done.append((max(moments), step, pids))

    @property
    def newest(self) -> int:
        return max((step for _, step, _ in self.done), default=-1)


def race(
    peer: Peer, python: str, *, repetition: int, hang_timeout_s: float, save_every: int, say: Callable[[str], None]
) -> RaceRun:
    """Raises RaceFailed if no step was made at all."""
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="fbr-"))
    shm = Path(tempfile.mkdtemp(prefix="fbr-", dir="/dev/shm"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    course = Course(folder, port, hang_timeout_s, save_every)
    track = _Track(folder / "losses")
    try:
        launched_s = time.monotonic()
        for host in range(peer.hosts):
            _start(peer, course, python, host, shm)
            threading.Event().wait(1.0 if host == 0 else 0.0)  # the first one has the store, or the supervisor
        if not _until(track, lambda: track.newest >= 0, START_DEADLINE_S):
            raise RaceFailed(f"{peer.name} made no step:\n{_output(folder)}")
        first_s = track.done[0][0]
        recoveries = []
        for fault in FAULTS:
            beside = partial(_start, peer, course, python, peer.hosts, shm) if peer.late_spare else None
            recoveries.append(_strike(track, course, fault, beside))
            say(f"{peer.name}, repetition {repetition}: {recoveries[-1]}")
            if recoveries[-1].next_step_s is None:
                break
        steps = sorted(b[0] - a[0] for a, b in zip(track.done, track.done[1:], strict=False) if b[1] == a[1] + 1)
        return RaceRun(
            peer=peer.name,
            repetition=repetition,
            start_s=first_s - launched_s,
            recoveries=tuple(recoveries),
            elapsed_s=track.done[-1][0] - first_s,
            steps_kept=track.newest + 1,
            step_s=steps[len(steps) // 2] if steps else 0.0,
            load_average_1m=round(load, 2),
        )
    finally:
        if "TRUST_KEEP" not in os.environ:
            _end(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(shm, ignore_errors=True)


def _start(peer: Peer, course: Course, python: str, host: int, shm: Path) -> None:
    ours = ("FLYBALL_", "PET_", "TORCHELASTIC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {**ENVIRONMENT, **peer.environment, SHM_DIR_VARIABLE: str(shm)}
    environment |= {MARK: str(course.folder), HOST: f"{course.folder}/{host}"}
    with (course.folder / f"host-{host}.out").open("ab") as out:
        process = subprocess.Popen(
            peer.command(course, python, host),
            cwd=course.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()


def _strike(track: _Track, course: Course, fault: str, start_spare: Callable[[], None] | None) -> Recovery:
    """Inject a fault into rank 1, or the host that it is on, after some calm seconds of training."""
    until_s = time.monotonic() + CALM_S
    _until(track, lambda: time.monotonic() > until_s, CALM_S + 1.0)
    before, hit = track.newest, track.pids[1]
    known = set(track.pids.values())
    struck_s = time.monotonic()
    if fault == "host":
        host = _environment(hit).get(HOST, "")
        _end(host, HOST)
        if start_spare is not None:
            start_spare()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hit, _SIGNALS[fault])

    def resumed() -> bool:
        return bool(track.done) and track.done[-1][0] > struck_s and hit not in track.done[-1][2]

    if not _until(track, resumed, RECOVERY_DEADLINE_S):
        return Recovery(
            fault, None, None, f"no step within {RECOVERY_DEADLINE_S:.0f} s: {_output(course.folder)[-600:]}"
        )
    at_s, step, _ = next(one for one in track.done if one[0] > struck_s and hit not in one[2])
    # What the ranks completed after the moment of the fault was done all the same.
    newest = max([before, *(s for t, s, pids in track.done if t < at_s and set(pids) & known)])
    return Recovery(fault, round(at_s - struck_s, 3), max(0, newest + 1 - step))


def _until(track: _Track, condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while True:
        track.pull()
        if condition():
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)


def _environment(pid: int) -> Mapping[str, str]:
    return next((environment_of(p) for p in own_processes() if p.pid == pid), {})


def _end(value: str, name: str = MARK) -> None:
    """Kill all processes of a run, or of one of its hosts, by their pids."""
    deadline_s = time.monotonic() + 30.0
    while value and time.monotonic() < deadline_s:
        left = [p.pid for p in own_processes() if environment_of(p).get(name) == value]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def _output(folder: Path) -> str:
    files = sorted(folder.glob("host-*.out"))
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % confidence interval (Student's t); nan for fewer than three values."""
    mean = statistics.fmean(values)
    if len(values) < 3:
        return mean, math.nan
    t = T_975[min(len(values) - 1, len(T_975)) - 1]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))
