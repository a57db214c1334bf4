"""Host daemons as processes, and through them engines, spawners and workers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from support.clocks.waits import DEADLINE_S, until
from support.commands.log_lines import read_log
from support.commands.own_processes import command_of, is_running, kill_all, processes_of
from support.servers.own_servers import free_port
from support.servers.played_supervisor import TOKEN, PlayedSupervisor


class HostDaemon:
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
        report_interval_s: float = 0.5,
    ) -> None:
        """`inside`: words before its command, which have it run in a network of its own."""
        self.host_id = host_id
        self.state_dir = root / host_id
        self.log_path = root / f"{host_id}.log"
        self.environment = dict(environment)
        self._command = [
            *(*inside, sys.executable, "-P", "-m", "host_daemon", "--state-dir", str(self.state_dir)),
            *("--host-id", host_id, "--supervisor", url, "--token-file", str(token_file)),
            *("--failure-domain", f"rack-of-{host_id}", "--address", address),
            *("--report-interval-s", str(report_interval_s)),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *extra: str) -> subprocess.Popen[bytes]:
        """Start it, without waiting."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, *extra],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.process

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        return int((self.state_dir / "engine.pid").read_text().split()[0])

    def kill(self) -> None:
        """Kill the daemon alone: all else of the host lives on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)  # SIGTERM would give notice and wait
        return self.process.wait(DEADLINE_S)

    def log(self) -> str:
        return self.log_path.read_text()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return read_log(self.log_path, event)

    def rank_log(self, generation: int, rank: int, job: str = "job") -> str:
        path = self.state_dir / "logs" / job / f"g{generation}" / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""


class LoneDaemon(HostDaemon):
    """A daemon before a supervisor that a test plays, with its own shared memory."""

    def __init__(self, root: Path, supervisor: PlayedSupervisor) -> None:
        self.root = root
        self.shm_dir = root / "shm"
        self.shm_dir.mkdir()
        self.token_file = root / "token"
        self.token_file.write_text(TOKEN)
        self.supervisor = supervisor
        environment = {**os.environ, "FLYBALL_SHM_DIR": str(self.shm_dir)}
        environment.pop("OMP_NUM_THREADS", None)
        super().__init__(root, "host-a", supervisor.url, self.token_file, environment, report_interval_s=0.2)
        self._given_ports: set[int] = set()

    def start(self, *extra: str) -> None:
        count = len(self.supervisor.reports)
        self.launch(*extra)
        until(lambda: len(self.supervisor.reports) > count or self._check(), "a first report")

    def _check(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.log()

    def port(self) -> int:
        """The port that the daemon proposes, unless a job has it: a store that binds its port slowly leaves it free for
        some time, and the newest report may be older than the store."""
        newest = self.supervisor.newest
        port = newest.facts.free_port if newest else 0
        if port in self._given_ports:
            port = free_port()
        self._given_ports.add(port)
        return port

    def clean_up(self) -> None:
        self.kill_all()
        shutil.rmtree(self.shm_dir)

    def kill_all(self) -> None:
        """Kill whatever this test started."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        kill_all(self._live)

    def owned(self) -> dict[int, str]:
        """The commands of its live processes: daemon, engine, spawner, workers."""
        return {process.pid: command_of(process.pid) for process in self._live()}

    def children(self, what: str) -> set[int]:
        """This daemon's processes with `what` on their command line."""
        children = psutil.Process(self.pid).children()
        return {child.pid for child in children if is_running(child.pid) and what in command_of(child.pid)}

    def _live(self) -> list[psutil.Process]:
        return [process for process in processes_of(self.state_dir) if is_running(process.pid)]
