"""A host daemon as a real process, and a fake supervisor for its HTTP interface."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
from support.commands.own_processes import is_of
from support.servers.own_servers import free_port

from flyball.contracts import wire
from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.credentials import host_credential
from flyball.contracts.decisions import (
    Command,
    CommandBatch,
    CommandBody,
    CommandUpdate,
    EndJob,
    StartWorkers,
    StopWorkers,
    UpdateState,
    WarmUp,
)
from flyball.contracts.identity import Fence
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import Report, ReportReply, Signal, WorkerExited

TOKEN = "a-token-for-tests"
HOST_TOKEN = host_credential(TOKEN, "host-a").token
DEADLINE_S = 120.0  # for a busy machine; otherwise nothing takes that long

T = TypeVar("T")


def until(what: str, condition: Callable[[], T | None], timeout_s: float = DEADLINE_S) -> T:
    """Wait for a condition and return its result."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        pause.wait(0.005)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


class Supervisor:
    """Replies as the real one would, by the contracts. Keeps everything that it receives."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.reports: list[Report] = []
        self.updates: list[CommandUpdate] = []
        self.open: list[Command] = []  # without a final answer
        self.handed_out: dict[str, float] = {}
        self.committed: dict[str, int] = {}
        self.commits = True  # False: signals are accepted, but never reported as committed
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.refusal_body = b"{}"
        self.refused = 0
        self.departure = Departure(may_leave=False, waits_for="the test")
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                supervisor._poll(self)

            def do_POST(self) -> None:
                supervisor._post(self)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def send(self, command: Command) -> None:
        with self.lock:
            self.open.append(command)
            self.handed_out.pop(command.command_id, None)
            self.lock.notify_all()

    def answer(self, command: Command, *, final: bool = True, count: int = 1) -> CommandUpdate:
        """The `count`-th answer to a command."""

        def found() -> CommandUpdate | None:
            with self.lock:
                updates = [
                    u
                    for u in self.updates
                    if u.command_id == command.command_id and (not final or u.state is not UpdateState.ACKNOWLEDGED)
                ]
            return updates[count - 1] if len(updates) >= count else None

        return until(f"an answer to {command.command_id}", found)

    def signals(self) -> list[Signal]:
        """Every signal once, in order of arrival."""
        with self.lock:
            seen = {(s.incarnation, s.seq): s for report in self.reports for s in report.signals}
        return list(seen.values())

    def exits(self, rank: int | None = None, job: str = "job") -> list[WorkerExited]:
        bodies = [s.body for s in self.signals() if isinstance(s.body, WorkerExited)]
        return [b for b in bodies if b.job == job and (rank is None or b.rank == rank)]

    def exit_of(self, rank: int, job: str = "job") -> WorkerExited:
        return until(f"the exit of rank {rank}", lambda: next(iter(self.exits(rank, job)), None))

    @property
    def newest(self) -> Report | None:
        return self.reports[-1] if self.reports else None

    def _post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if not self._admitted(request):
            return
        if request.path == "/v1/reports":
            report = wire.decode(body, Report)
            with self.lock:
                self.reports.append(report)
                if self.commits:
                    for s in report.signals:
                        self.committed[s.incarnation] = max(self.committed.get(s.incarnation, 0), s.seq)
                reply = ReportReply(dict(self.committed))
            self._reply(request, 200, wire.encode(reply))
        elif re.fullmatch(r"/v1/hosts/[^/]+/updates", request.path.partition("?")[0]):
            update = wire.decode(body, CommandUpdate)
            with self.lock:
                self.updates.append(update)
                if update.state is not UpdateState.ACKNOWLEDGED:
                    self.open = [c for c in self.open if c.command_id != update.command_id]
            self._reply(request, 204, b"")
        else:
            self._reply(request, 404, b"{}")

    def _poll(self, request: BaseHTTPRequestHandler) -> None:
        if not self._admitted(request):
            return
        if request.path.endswith("/departure"):
            self._reply(request, 200, wire.encode(self.departure))
            return
        with self.lock:
            self.lock.wait_for(self._due, timeout=1.0)
            due = self._due()
            self.handed_out.update((command.command_id, time.monotonic()) for command in due)
        self._reply(request, 200, wire.encode(CommandBatch(tuple(due))))

    def _due(self) -> list[Command]:
        """Commands not sent yet, or sent a while ago: the daemon may have been killed before it read them."""
        now = time.monotonic()
        return [c for c in self.open if now - self.handed_out.get(c.command_id, -1.0) > 1.0]

    def _admitted(self, request: BaseHTTPRequestHandler) -> bool:
        if request.headers.get("Authorization") != f"Bearer {HOST_TOKEN}":
            self.refused += 1
            self._reply(request, 401, b"{}")
            return False
        if self.refusal is not None:
            self.refused += 1
            self._reply(request, self.refusal[0], self.refusal_body, self.refusal[1])
            return False
        return True

    def _reply(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        try:
            request.send_response(status)
            for name, value in (headers or {}).items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        except OSError:
            return  # the daemon was killed while it waited


class Daemon:
    """One host daemon process with its own state folder."""

    until = staticmethod(until)

    def __init__(self, root: Path, supervisor: Supervisor) -> None:
        self.root = root
        self.state_dir = root / "state"
        self.shm_dir = root / "shm"
        self.shm_dir.mkdir()
        self.token_file = root / "token"
        self.token_file.write_text(TOKEN)
        self.supervisor = supervisor
        self.environ = {**os.environ, "FLYBALL_SHM_DIR": str(self.shm_dir)}
        self.environ.pop("OMP_NUM_THREADS", None)
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = root / "daemon.log"
        self._given_ports: set[int] = set()

    def start(self, *extra: str) -> None:
        count = len(self.supervisor.reports)
        self.process = self.launch(*extra)
        until("a first report", lambda: len(self.supervisor.reports) > count or self._check())

    def launch(self, *extra: str) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "host_daemon", "--state-dir", str(self.state_dir)),
                    *("--host-id", "host-a", "--supervisor", self.supervisor.url),
                    *("--token-file", str(self.token_file), "--report-interval-s", "0.2", *extra),
                ],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _check(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.log_path.read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)  # SIGTERM would give notice and wait
        return self.process.wait(DEADLINE_S)

    def owned(self) -> dict[int, str]:
        """Live processes that name this state folder on their command line, or write their output into it: daemon,
        engine, spawner, workers."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    is_own = str(self.state_dir) in command or is_of(psutil.Process(int(entry.name)), self.state_dir)
                except (OSError, psutil.Error):
                    continue
                if is_own and state not in "ZX":
                    found[int(entry.name)] = command
        return found

    def children(self, what: str) -> set[int]:
        """This daemon's processes with `what` on their command line."""
        found = set()
        for pid in (pid for pid, command in self.owned().items() if what in command):
            try:
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if parent == str(self.pid):
                found.add(pid)
        return found

    def port(self) -> int:
        """The port that the daemon proposes, unless a job has it: a store that binds its port slowly leaves it free for
        some time, and the newest report may be older than the store."""
        newest = self.supervisor.newest
        port = newest.facts.free_port if newest else 0
        if port in self._given_ports:
            port = free_port()
        self._given_ports.add(port)
        return port

    def log(self) -> str:
        return self.log_path.read_text()

    def rank_log(self, generation: int, rank: int, job: str = "job") -> str:
        path = self.state_dir / "logs" / job / f"g{generation}" / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def clean_up(self) -> None:
        self.kill_all()
        shutil.rmtree(self.shm_dir)

    def kill_all(self) -> None:
        """Kill whatever this test started."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        until("the end of everything that this test started", self._all_killed)

    def _all_killed(self) -> bool:
        owned = self.owned()
        for pid in owned:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not owned


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    server = Supervisor()
    yield server
    server.close()


@pytest.fixture
def daemon(tmp_path: Path, supervisor: Supervisor) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, supervisor)
    yield daemon
    daemon.clean_up()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for tests that only use it. Its warm standby is kept between tests."""
    server = Supervisor()
    daemon = Daemon(tmp_path_factory.mktemp("shared"), server)
    daemon.start()
    keeper = Job(daemon, "", name="keeper")
    keeper.send(WarmUp(keeper.spec), generation=1)
    yield daemon
    daemon.clean_up()
    server.close()


class Job:
    """Creates the commands for a job of one host."""

    def __init__(self, daemon: Daemon, script: str, *, nproc: int = 1, name: str = "job", **spec: object) -> None:
        self.daemon = daemon
        self.workdir = daemon.root / f"{name}-code"
        self.workdir.mkdir()
        (self.workdir / "train.py").write_text(script)
        environment = {"OMP_NUM_THREADS": "1"}  # the same for any number of ranks, which then share a standby
        settings = {"argv": ("train.py",), "workdir": str(self.workdir), "env": environment, **spec}
        self.spec = msgspec.convert(
            {"job": name, "nproc_per_node": nproc, "stop_grace_s": 0.0, **settings}, JobSpec, strict=False
        )
        self._number = 0

    def placement(self, generation: int, *, port: int = 0) -> Placement:
        host = HostRanks("host-a", "127.0.0.1", "", tuple(range(self.spec.nproc_per_node)))
        return Placement(
            job=self.spec.job,
            generation=generation,
            world_size=self.spec.nproc_per_node,
            hosts=(host,),
            master_address="127.0.0.1",
            master_port=port or self.daemon.port(),
            peers={},
            lineage=(LineageEntry(generation),),
            restore=None,
            restart_count=generation - 1,
        )

    def command(
        self, body: CommandBody, *, generation: int, epoch: int = 1, command_id: str = "", deadline_s: float = 110.0
    ) -> Command:
        self._number += 1
        return Command(
            command_id=command_id or f"act-{self.spec.job}-{self._number}.{type(body).__name__.lower()}.host-a.1",
            action_id=f"act-{self._number}",
            host_id="host-a",
            fence=Fence(epoch, generation),
            body=body,
            deadline_s=deadline_s,
        )

    def send(self, body: CommandBody, *, generation: int, epoch: int = 1) -> CommandUpdate:
        command = self.command(body, generation=generation, epoch=epoch)
        self.daemon.supervisor.send(command)
        return self.daemon.supervisor.answer(command)

    def log(self, generation: int = 1, rank: int = 0) -> str:
        return self.daemon.rank_log(generation, rank, self.spec.job)

    def wait_up(self, generation: int = 1, rank: int = 0) -> None:
        """The worker printed "up"."""
        until(f"rank {rank} up", lambda: "up" in self.log(generation, rank).split())

    def exit_of(self, rank: int) -> WorkerExited:
        return self.daemon.supervisor.exit_of(rank, self.spec.job)

    def start(self, generation: int = 1, *, epoch: int = 1, port: int = 0) -> CommandUpdate:
        body = StartWorkers(self.spec, self.placement(generation, port=port))
        update = self.send(body, generation=generation, epoch=epoch)
        assert update.state is UpdateState.SUCCEEDED, update
        return update

    def stop(self, generation: int = 1, *, grace_s: float = 0.0, epoch: int = 1) -> CommandUpdate:
        return self.send(StopWorkers(self.spec.job, generation, grace_s), generation=generation, epoch=epoch)

    def end(self, generation: int = 1, *, grace_s: float = 0.0) -> CommandUpdate:
        return self.send(EndJob(self.spec.job, generation, grace_s), generation=generation)


@pytest.fixture
def make_job(daemon: Daemon) -> Callable[..., Job]:
    def make(script: str, **settings: object) -> Job:
        return Job(daemon, script, **settings)  # type: ignore[arg-type]  # passed through as given

    return make


@pytest.fixture
def make_shared_job(shared: Daemon, request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Jobs with unique names on the shared daemon, ended with the test."""
    made: list[Job] = []

    def make(script: str, **settings: object) -> Job:
        digest = hashlib.blake2b(request.node.name.encode(), digest_size=4).hexdigest()
        made.append(Job(shared, script, name=f"job-{digest}-{len(made)}", **settings))  # type: ignore[arg-type]  # as given
        return made[-1]

    yield make
    for job in made:
        job.end(1_000)
