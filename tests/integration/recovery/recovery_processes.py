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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from simulator.inject.processes import own_processes

DEADLINE_S = 90.0  # of every wait: generous, since nothing is won by an early end
REPORT_INTERVAL_S = "0.2"

T = TypeVar("T")


def until(what: str, condition: Callable[[], T | None], timeout_s: float = DEADLINE_S) -> T:
    """Wait for a condition, and return what made it true; fails the test at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        pause.wait(0.02)


def free_port() -> int:
    """Outside the range that outgoing connections take theirs from: it stays free while its owner is away."""
    for port in range(20_000 + os.getpid() % 7_000, 32_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
    raise AssertionError("no free port")


_given: set[int] = set()


def clean_environment() -> dict[str, str]:
    """This process's, without what would steer Flyball or torchrun; one thread per rank, as torchrun has it."""
    ours = ("FLYBALL_", "PET_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {"OMP_NUM_THREADS": "1"}


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


def kill_all_with(entry: str) -> None:
    """End them, and those that they start meanwhile, by their pids."""

    def all_gone() -> bool:
        found = processes_with(entry)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(f"the end of all that has {entry}", all_gone)


def read_log(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a JSON log that tell of an event; a line that is being written does not count yet."""
    found = []
    for line in path.read_text().splitlines():
        if f'"{event}"' in line and line.endswith("}"):
            record = json.loads(line)
            if record.get("event") == event:
                found.append(record)
    return found


class Part:
    """The supervisor, or one part of it, as a process that can be killed and started again at the same address."""

    def __init__(self, root: Path, name: str, environment: Mapping[str, str], *, folder: str = "supervisor") -> None:
        self.name = name
        self.state_dir = root / folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = root / f"{folder}-{name}.log"
        self._database_url = f"sqlite:///{root / 'flyball.sqlite'}"
        self._environment = dict(environment)
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, fault_point: str = "") -> None:
        """Start it, without waiting; `fault_point` has it die there."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} still runs"
        options = ("--state-dir", str(self.state_dir), "--port", str(self.port), "--database-url", self._database_url)
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

    @property
    def token(self) -> str:
        return (self.state_dir / "token").read_text().strip()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return read_log(self.log_path, event)


class Host:
    """One host: its daemon, and through it engine, spawner and workers."""

    def __init__(self, root: Path, host_id: str, url: str, token_file: Path, environment: Mapping[str, str]) -> None:
        self.host_id = host_id
        self.state_dir = root / host_id
        self.log_path = root / f"{host_id}.log"
        self._environment = dict(environment)
        self._arguments = [
            *("--state-dir", str(self.state_dir), "--host-id", host_id, "--supervisor", url),
            *("--token-file", str(token_file), "--failure-domain", f"rack-of-{host_id}"),
            *("--report-interval-s", REPORT_INTERVAL_S),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "host_daemon", *self._arguments],
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
