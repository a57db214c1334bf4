"""Processes of a stack: started with a mark in their environment, by which they are found, and ended by their pids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from support.servers.own_servers import free_port

from flyball.contracts.cluster import Phase
from services.sensor.detector.stances import Stance
from simulator.inject.processes import own_processes

DEADLINE_S = 300.0  # of every wait: generous, since nothing is won by an early end
REPORT_INTERVAL_S = "0.5"

T = TypeVar("T")


def detector(*, stalled_s: float, silent_s: float = 0.6) -> dict[str, str]:
    """A setting for stacks: at least so long ranks may stay in a step, and hosts say nothing when nobody vouches for
    them. Both happens on a busy machine without a fault, and would be further incidents, and right."""
    steps = {"unknown_s": 600.0, "floor_s": stalled_s, "factor": 8.0}
    stalls = {
        "phases": {Phase.STEP.value: steps},
        "stances": dict.fromkeys((Stance.STANDS, Stance.TOGETHER, Stance.BLOCKED, Stance.WORKING), stalled_s),
        "unsettled_s": stalled_s,
    }
    settings = {"silence": {"min_deadline_s": silent_s}, "stalls": stalls}
    return {"FLYBALL_DETECTOR": json.dumps(settings)}


PATIENT = detector(stalled_s=120.0, silent_s=20.0)  # of a stack with which neither is tried


def until(what: str, condition: Callable[[], T | None], timeout_s: float = DEADLINE_S) -> T:
    """Wait for a condition, and return what made it true; fails the test at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    pause, pause_s = threading.Event(), 0.02
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        pause.wait(pause_s)
        pause_s = min(pause_s * 1.2, 0.25)  # many conditions ask the supervisor, and cost as much as its own work


def clean_environment() -> dict[str, str]:
    """This process's, without what would steer Flyball or torchrun; one thread per rank, as torchrun has it; and no
    probe sees this machine, whose load would be signals among those of the faults."""
    ours = ("FLYBALL_", "PET_", "TORCHELASTIC_")
    own = {"OMP_NUM_THREADS": "1", "FLYBALL_PROBE_ROOT": "/nowhere"}
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | own


def processes_with(entry: str) -> list[int]:
    """Pids of this user's live processes that have this entry, "NAME=value", in their environment."""
    found = []
    for process in own_processes():
        try:
            entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if entry.encode() in entries:
            found.append(process.pid)
    return found


def is_running(pid: int) -> bool:
    """Not if it has ended and only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_all_with(entry: str) -> None:
    """End them, and those that they start meanwhile, by their pids."""

    def all_gone() -> bool:
        found = processes_with(entry)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(f"the end of all that has {entry}", all_gone)


def whole_lines(path: Path) -> list[str]:
    """Without the one that is being written: across the end of a page it can be seen by halves."""
    return path.read_text().rpartition("\n")[0].splitlines()


def read_log(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a JSON log that tell of an event."""
    found = []
    for line in whole_lines(path):
        if f'"{event}"' in line:
            record = json.loads(line)
            if record.get("event") == event:
                found.append(record)
    return found


class Part:
    """The supervisor, or one part of it, as a process that can be killed and started again at the same address."""

    def __init__(
        self,
        root: Path,
        name: str,
        environment: Mapping[str, str],
        *,
        folder: str = "supervisor",
        address: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.state_dir = root / folder
        self.port = free_port()
        self.url = f"http://{address}:{self.port}"
        self.log_path = root / f"{folder}-{name}.log"
        database_url = environment.get("FLYBALL_DATABASE_URL", f"sqlite:///{root / 'flyball.sqlite'}")
        self._environment = dict(environment) | {"FLYBALL_HOST": address, "FLYBALL_DATABASE_URL": database_url}
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, fault_point: str = "") -> None:
        """Start it, without waiting; `fault_point` has it die there."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} still runs"
        options = ("--state-dir", str(self.state_dir), "--port", str(self.port))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.main", self.name, *options],
                env=self._environment | {"FLYBALL_FAULT_POINT": fault_point},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def wait_up(self) -> None:
        record = self.state_dir / f"{'supervisor' if self.name in ('all', 'api') else self.name}.json"

        def is_up() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log_path.read_text()
            try:
                return bool(json.loads(record.read_text())["pid"] == self.process.pid)
            except (OSError, ValueError):
                return False

        until(f"{self.name} serves", is_up)

    def start(self, fault_point: str = "") -> None:
        self.launch(fault_point)
        self.wait_up()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def token(self) -> str:
        return (self.state_dir / "token").read_text().strip()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return read_log(self.log_path, event)


class Forwarder:
    """A TCP port in front of another one of this machine: a network between a daemon and the supervisor that can be cut
    while all processes go on."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.heal()

    def heal(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        with self._lock:
            self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """End what goes through it, and let nothing new through."""
        with self._lock:
            ended = [*self._open, *([self._listener] if self._listener else [])]
            self._listener = None
            self._open.clear()
        for sock in ended:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # it is busy: the daemon tries again
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                    is_cut = self._listener is not listener
                if is_cut:
                    self.cut_off(near, far)
                    return
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        self.cut_off(source, sink)

    def cut_off(self, *pair: socket.socket) -> None:
        """End one connection."""
        with self._lock:
            self._open -= set(pair)
        for sock in pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Host:
    """One host: its daemon, and through it engine, spawner and workers."""

    def __init__(
        self,
        root: Path,
        host_id: str,
        url: str,
        token_file: Path,
        environment: Mapping[str, str],
        *,
        address: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """`inside`: words before its command, which have it run in a network of its own."""
        self.host_id = host_id
        self.state_dir = root / host_id
        self.log_path = root / f"{host_id}.log"
        self._environment = dict(environment)
        self._arguments = [
            *("--state-dir", str(self.state_dir), "--host-id", host_id, "--supervisor", url),
            *("--token-file", str(token_file), "--failure-domain", f"rack-of-{host_id}"),
            *("--report-interval-s", REPORT_INTERVAL_S, "--address", address),
        ]
        self._inside = inside
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._inside, sys.executable, "-P", "-m", "host_daemon", *self._arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_daemon(self) -> None:
        """Of the daemon only: all else of the host lives on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process = None

    @property
    def engine_pid(self) -> int:
        return int((self.state_dir / "engine.pid").read_text().split()[0])

    def logged(self, event: str) -> list[dict[str, Any]]:
        return read_log(self.log_path, event)
