"""One run of one launcher: two hosts on this machine, the faults at the same moments for all, and what was measured.

All is read from the ranks' loss lines, as they appear: no launcher's own log or count is asked.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from goodput_bench.faults import HANG, RAISE

from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from simulator.inject.processes import environment_of, look_at
from trust_bench.interruption import Interruption
from trust_bench.own import clean_environment, end_marked, marked, newest_lines
from trust_bench.peers import ENVIRONMENT, Course, Peer
from trust_bench.track import Track

MARK = "TRUST_RACE"  # folder of the run, in the environment of all its processes
HOST = "TRUST_RACE_HOST"
START_DEADLINE_S = 300.0
RECOVERY_DEADLINE_S = 120.0
STORE_DEADLINE_S = 120.0
LOOK_S = 0.005
HOST_LOOK_S = 0.5  # all processes of the machine are read each time
CALM_S = 6.0  # of training before each fault: standbys are warm again, and a save is complete
NOTICE_S = 30.0  # from the notice until what is left of the host is killed, as most batch systems have it
FAULTS = ("kill", "exception", "hang", "host", "notice")
_SIGNALS = {"kill": signal.SIGKILL, "exception": RAISE, "hang": HANG}


class Recovery(msgspec.Struct, frozen=True):
    """One fault. `next_step_s`: from it to the next step of all ranks, and for a notice, during which ranks may train
    on, from the last step before the move; None: there was none in time, there was nothing left to strike, or the peer
    cannot do it, as `why` says. `alone_s`: from it until the rank that was not struck had made two more steps by
    itself; None: it waited for the other."""

    fault: str
    next_step_s: float | None
    lost_steps: int | None
    why: str = ""
    alone_s: float | None = None


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


class Moment(NamedTuple):
    """When a fault strikes: the step, counted from the last that is saved, and how far it has come."""

    steps_after_save: int
    share_of_step: float


def moment_of(fault: str, repetition: int, save_every: int) -> Moment:
    """The same for all peers, so that none is struck more luckily than another."""
    chance = random.Random(f"{repetition}:{fault}")
    return Moment(chance.randrange(save_every), chance.random())


def race(
    peer: Peer,
    python: str,
    *,
    repetition: int,
    hang_timeout_s: float,
    save_every: int,
    say: Callable[[str], None],
    interruption: Interruption,
) -> RaceRun:
    """Raises RaceFailed if no step was made at all."""
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="fbr-"))
    shm = Path(tempfile.mkdtemp(prefix="fbr-", dir="/dev/shm"))
    try:
        run = _Run(peer, python, Course(folder, _free_port(), hang_timeout_s, save_every), shm)
        launched_s = time.monotonic()
        run.start()
        track = run.track
        if not run.until(lambda: track.newest >= 0, START_DEADLINE_S):
            raise RaceFailed(f"{peer.name} made no step within {START_DEADLINE_S:.0f} s:\n{run.output()}")
        first_s = track.done[0].at_s
        recoveries: list[Recovery] = []
        for fault in FAULTS:
            if fault in peer.cannot:
                recoveries.append(Recovery(fault, None, None, peer.cannot[fault]))
                continue
            recoveries.append(run.strike(fault, moment_of(fault, repetition, save_every)))
            say(f"{peer.name}, repetition {repetition}: {recoveries[-1]}")
            if recoveries[-1].next_step_s is None:
                break  # what follows would be that of a broken job
        steps = sorted(
            b.at_s - a.at_s for a, b in zip(track.done, track.done[1:], strict=False) if b.step == a.step + 1
        )
        return RaceRun(
            peer=peer.name,
            repetition=repetition,
            start_s=first_s - launched_s,
            recoveries=tuple(recoveries),
            elapsed_s=track.done[-1].at_s - first_s,
            steps_kept=track.newest + 1,
            step_s=steps[len(steps) // 2] if steps else 0.0,
            load_average_1m=round(load, 2),
        )
    finally:
        with interruption.shielded():
            end_marked(MARK, str(folder))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(shm, ignore_errors=True)


class _Run:
    """The processes of a race."""

    def __init__(self, peer: Peer, python: str, course: Course, shm: Path) -> None:
        self.track = Track(course.folder / "losses")
        self._peer = peer
        self._python = python
        self._course = course
        self._shm = shm
        self._launchers: dict[int, int] = {}  # host -> pid
        self._next_host = 0

    def start(self) -> None:
        if self._peer.server is not None:
            self._start("server", self._peer.server(self._course, self._python))
        else:
            self._start_host()
        # The others need the store, or the supervisor.
        self.until(lambda: _is_open(self._course.port), STORE_DEADLINE_S)
        while self._next_host < self._peer.hosts:
            self._start_host()

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.track.pull()
            if condition():
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(LOOK_S)

    def output(self) -> str:
        return newest_lines(list(self._course.folder.glob("*.out")))

    def strike(self, fault: str, moment: Moment) -> Recovery:
        """Inject a fault after some calm seconds of training, and watch what follows."""
        track = self.track
        if not self._wait_for(moment):
            return self._not_struck(fault, f"the step to strike at was not made within {RECOVERY_DEADLINE_S:.0f} s")
        victim = self._victim()
        if victim is None:
            return self._not_struck(fault, "no live rank on another host than the first")
        host, hit = victim
        before, known = track.newest, set(track.pids.values())
        struck_s = gone_s = time.monotonic()
        if fault == "host":
            end_marked(HOST, self._host_mark(host))
        elif fault == "notice":
            _signal(self._launchers[host], signal.SIGTERM)
        else:
            _signal(hit, _SIGNALS[fault])
        if fault in ("host", "notice") and self._peer.late_spare:
            self._start_host()
        if fault == "notice":
            self._see_off(host, struck_s + NOTICE_S)
            gone_s = time.monotonic()

        def trains() -> bool:
            return bool(track.done) and track.done[-1].at_s > gone_s and hit not in track.done[-1].pids

        is_back = self.until(trains, RECOVERY_DEADLINE_S)
        # The first one: after a notice many more may have been made before the host was gone.
        back = next((one for one in track.done if one.at_s > struck_s and hit not in one.pids), None)
        back_s = back.at_s if back is not None else time.monotonic()
        # What the ranks completed after the moment of the fault was done all the same.
        old = [one for one in track.done if one.at_s < back_s and set(one.pids) & known]
        newest = max([before, *(one.step for one in old)])
        stood_since_s = max([struck_s, *(one.at_s for one in old)]) if fault == "notice" else struck_s
        alone = [x.at_s for x in track.lines if x.pid in known - {hit} and x.step >= newest + 2 and x.at_s <= back_s]
        # A step that was under way is no sign that the others train on: two are.
        alone_s = round(max(0.0, min(alone) - stood_since_s), 3) if alone else None
        if back is None or not is_back:
            why = f"no step of all ranks within {RECOVERY_DEADLINE_S:.0f} s: {self.output()[-600:]}"
            return Recovery(fault, None, None, why, alone_s)
        return Recovery(fault, round(back_s - stood_since_s, 3), max(0, newest + 1 - back.step), "", alone_s)

    def _not_struck(self, fault: str, why: str) -> Recovery:
        return Recovery(fault, None, None, f"{why}: {self.output()[-600:]}")

    def _see_off(self, host: int, until_s: float) -> None:
        """Leave the host to itself until then, or until all of it has ended; then kill what is left."""
        mark, look_s = self._host_mark(host), 0.0

        def has_ended() -> bool:
            nonlocal look_s
            if look_at(self._launchers[host]) is not None or time.monotonic() < look_s:
                return False
            look_s = time.monotonic() + HOST_LOOK_S
            return not marked(HOST, mark)

        self.until(has_ended, until_s - time.monotonic())
        end_marked(HOST, mark)

    def _wait_for(self, moment: Moment) -> bool:
        """False: the ranks stand, or are too slow."""
        track, every = self.track, self._course.save_every
        calm_s = time.monotonic() + CALM_S
        self.until(lambda: time.monotonic() > calm_s, CALM_S + 1.0)

        def is_at_step() -> bool:
            return track.done[-1].at_s > calm_s and (track.newest + 1) % every == moment.steps_after_save

        if not self.until(is_at_step, RECOVERY_DEADLINE_S):
            return False
        time.sleep(moment.share_of_step * self._course.step_floor_s)
        track.pull()
        return True

    def _victim(self) -> tuple[int, int] | None:
        """The host that is struck, and the pid of its rank: never the one with the store, or the supervisor."""
        for rank in sorted(self.track.pids, reverse=True):
            pid = self.track.pids[rank]
            process = look_at(pid)
            name = environment_of(process).get(HOST, "").rpartition("/host-")[2] if process is not None else ""
            if name and int(name) != 0:
                return int(name), pid
        return None

    def _host_mark(self, host: int) -> str:
        return f"{self._course.folder}/host-{host}"

    def _start_host(self) -> None:
        host, self._next_host = self._next_host, self._next_host + 1
        self._launchers[host] = self._start(f"host-{host}", self._peer.command(self._course, self._python, host))

    def _start(self, name: str, command: list[str]) -> int:
        environment = clean_environment() | {**ENVIRONMENT, **self._peer.environment, SHM_DIR_VARIABLE: str(self._shm)}
        folder = str(self._course.folder)
        environment |= {MARK: folder, HOST: f"{folder}/{name}", "TMPDIR": folder}
        with (self._course.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                command,
                cwd=self._course.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        threading.Thread(target=process.wait, daemon=True).start()
        return process.pid


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
