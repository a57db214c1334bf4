"""Real stacks on this machine: supervisor, host daemons, engines and training as processes, each ended by its pid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flyball.cli.client import ApiClient
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import Unreachable
from flyball.contracts.segments import SHM_DIR_VARIABLE
from simulator.inject.processes import own_processes

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
ARMED_EXAMPLE = Path(__file__).parent / "armed_gpt.py"
SMALL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "24", "--batch-size", "1", "--seed", "7")
QUIET = ("--print-every", "1000000")
PACE_S = 0.02
DEADLINE_S = 90.0  # of every wait: generous, since nothing is won by an early end
REPORT_INTERVAL_S = "0.2"

T = TypeVar("T")
Losses = Mapping[tuple[int, int], set[str]]  # (rank, step) -> every loss that was ever computed for it


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


def read_losses(folder: Path) -> Losses:
    losses: dict[tuple[int, int], set[str]] = defaultdict(set)
    for file in folder.glob("rank*.txt"):
        for line in file.read_text().splitlines():
            step, loss, _ = line.split()
            losses[int(file.stem.removeprefix("rank")), int(step)].add(loss)
    return losses


class Reference:
    """The uninterrupted runs: plain torchrun, the same seed, one per world size, each only as far as it is needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._torchruns: dict[int, subprocess.Popen[bytes]] = {}

    def losses(self, world_size: int, steps: int) -> Losses:
        """Those of at least so many steps."""
        folder = self._root / f"{world_size}-ranks"
        if world_size not in self._torchruns:
            self._torchruns[world_size] = self._start(world_size, folder)

        def has_steps() -> Losses | None:
            assert self._torchruns[world_size].poll() is None, folder.with_suffix(".log").read_text()
            losses = read_losses(folder)
            return losses if all((rank, steps - 1) in losses for rank in range(world_size)) else None

        self._send(folder, signal.SIGCONT)
        losses = until(f"step {steps} of the uninterrupted run", has_steps)
        self._send(folder, signal.SIGSTOP)
        return losses

    def _start(self, world_size: int, folder: Path) -> subprocess.Popen[bytes]:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
        arguments = ("--steps", "1000000", *SMALL, *QUIET, "--losses-dir", str(folder))
        with folder.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                [*torchrun, str(EXAMPLE), *arguments],
                env=clean_environment() | {"RECOVERY_REFERENCE": str(folder)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _send(self, folder: Path, number: signal.Signals) -> None:
        for process in processes_with(f"RECOVERY_REFERENCE={folder}"):
            os.kill(process, number)

    def end(self) -> None:
        for world_size, torchrun in self._torchruns.items():
            kill_all_with(f"RECOVERY_REFERENCE={self._root / f'{world_size}-ranks'}")
            torchrun.wait(DEADLINE_S)


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


def read_log(path: Path, event: str) -> list[dict[str, Any]]:
    """The lines of a JSON log that tell of an event; a line that is being written does not count yet."""
    found = []
    for line in path.read_text().splitlines():
        if f'"{event}"' in line and line.endswith("}"):
            record = json.loads(line)
            if record.get("event") == event:
                found.append(record)
    return found


class Job:
    """A training job, and what its ranks wrote down."""

    def __init__(self, stack: Stack, name: str, world_size: int) -> None:
        self.stack = stack
        self.name = name
        self.world_size = world_size
        self.folder = stack.root / f"job-{name}"
        self.folder.mkdir()
        self.losses_dir = self.folder / "losses"

    def arm(self, fault: str, rank: int) -> None:
        """Have a rank meet this fault at its next step; see armed_gpt.py."""
        (self.folder / f"{fault}.rank{rank}").touch()

    def get(self) -> dict[str, Any]:
        return dict(self.stack.api.get(f"/v1/jobs/{self.name}"))

    def host_of(self, rank: int) -> str:
        return next(str(r["host_id"]) for r in self.get()["ranks"] if r["rank"] == rank)

    def pid_of(self, rank: int) -> int:
        """Of the newest process of a rank, from its own record."""
        return [pid for _, r, pid in self.spawns() if r == rank][-1]

    def spawns(self) -> list[tuple[int, int, int]]:
        """(generation, rank, pid) of every process that was started for the job, in order."""
        text = (self.folder / "spawns.txt").read_text()
        return [(int(g), int(r), int(p)) for g, r, p in (line.split() for line in text.splitlines())]

    def executed(self) -> list[int]:
        """The step that each rank executed last."""
        newest = []
        for rank in range(self.world_size):
            file = self.losses_dir / f"rank{rank}.txt"
            lines = file.read_text().splitlines() if file.exists() else []
            newest.append(int(lines[-1].split()[0]) if lines else -1)
        return newest

    def train_on(self, steps: int = 5) -> None:
        """Wait until every rank has done so many steps more."""
        goal = max(self.executed()) + steps

        def reached() -> bool:
            self.stack.check()
            return min(self.executed()) >= goal

        until(f"step {goal} of {self.name}", reached)

    def incidents(self) -> list[dict[str, Any]]:
        return self.stack.api.items("/v1/incidents", job=self.name)

    @contextmanager
    def next_incident(self) -> Iterator[dict[str, Any]]:
        """Meets a fault inside the block; at its end the incident that followed is closed, and in the dictionary."""
        known = {incident["incident_id"] for incident in self.incidents()}
        incident: dict[str, Any] = {}
        yield incident

        def closed() -> dict[str, Any] | None:
            try:
                new = [i for i in self.incidents() if i["incident_id"] not in known]
            except Unreachable:
                return None  # it is being started again
            assert len(new) <= 1, new
            return new[0] if new and new[0]["state"] in ("resolved", "escalated") else None

        incident.update(until(f"the end of an incident of {self.name}", closed))

    def decisions(self, incident: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Those of an incident that were acted on."""
        found = self.stack.api.items("/v1/decisions", job=self.name)
        return [d for d in found if d["incident_id"] == incident["incident_id"] and d["kind"] != "hold"]

    def check_losses(self, reference: Reference) -> Losses:
        """Every execution of every step has the loss of the uninterrupted run, to the last bit, and none is missing."""
        losses = read_losses(self.losses_dir)
        expected = reference.losses(self.world_size, 1 + max(step for _, step in losses))
        assert losses == {key: expected[key] for key in losses}
        for rank in range(self.world_size):
            steps = {step for r, step in losses if r == rank}
            assert steps == set(range(max(steps) + 1))
        return losses

    def check_goodput(self) -> dict[str, Any]:
        """Every second of the job is in exactly one category."""
        report: dict[str, Any] = self.stack.api.get("/v1/goodput", job=self.name)
        assert sum(report["seconds_by_category"].values()) == pytest.approx(report["elapsed_s"], abs=1e-6)
        assert report["seconds_by_category"]["useful"] > 0
        return report


class Stack:
    """A supervisor and its hosts. Everything started here carries one variable, by which it is found and ended."""

    until = staticmethod(until)

    def __init__(self, **settings: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="flyball-r-"))  # short: a Unix socket's path is limited
        self.shm_dir = Path(tempfile.mkdtemp(prefix="flyball-r-", dir="/dev/shm"))
        self.environment = clean_environment() | {SHM_DIR_VARIABLE: str(self.shm_dir)} | settings
        self.hosts: dict[str, Host] = {}
        self.lost: set[str] = set()
        self.parts: dict[str, Part] = {}
        self.daemons_url = ""
        self._api: ApiClient | None = None

    def start_supervisor(self) -> None:
        self.parts["all"] = supervisor = Part(self.root, "all", self.environment)
        self.daemons_url = supervisor.url
        supervisor.start()

    @property
    def supervisor(self) -> Part:
        return self.parts["all"]

    @property
    def api(self) -> ApiClient:
        if self._api is None:
            part = self.parts.get("all") or self.parts["api"]
            self._api = ApiClient(part.url, part.token)
        return self._api

    def add_hosts(self, *host_ids: str) -> None:
        for host_id in host_ids:
            token_file = self.root / "supervisor" / "token"
            self.hosts[host_id] = Host(self.root, host_id, self.daemons_url, token_file, self.environment)
            self.hosts[host_id].start()
        until(f"reports of {', '.join(host_ids)}", lambda: set(host_ids) <= set(self.host_states()))

    def host_states(self) -> dict[str, str]:
        self.check()
        return {h["host_id"]: h["state"] for h in self.api.items("/v1/hosts") if h["engine_alive"]}

    def counters(self, host_id: str) -> Mapping[str, int]:
        """Of the host's engine, as last reported."""
        return next(dict(h["counters"]) for h in self.api.items("/v1/hosts") if h["host_id"] == host_id)

    def job(self, name: str, world_size: int) -> Job:
        return Job(self, name, world_size)

    def submit(self, job: Job, spec: Mapping[str, Any]) -> None:
        self.api.post("/v1/jobs", JobSpec(job=job.name, workdir=str(job.folder), stop_grace_s=0.0, **spec))

    def train(self, name: str, *, nnodes: int, nproc_per_node: int, **spec: Any) -> Job:  # noqa: ANN401 - of JobSpec
        """Start the example, and wait for its first steps."""
        job = self.job(name, nnodes * nproc_per_node)
        argv = (str(ARMED_EXAMPLE), "--steps", "100000", *SMALL, *QUIET, "--losses-dir", str(job.losses_dir))
        env = {"ARMED_DIR": str(job.folder), "ARMED_PACE_S": str(PACE_S)}
        shape = {"nnodes": nnodes, "nproc_per_node": nproc_per_node, "max_restarts": 100}
        self.submit(job, {"argv": argv, "env": env, **shape, **spec})
        job.train_on()
        return job

    def check(self) -> None:
        """Fail at once where waiting on would be in vain."""
        for host_id, host in self.hosts.items():
            ended = host.process is not None and host.process.poll() is not None
            assert host_id in self.lost or not ended, f"{host_id} ended: {host.log_path.read_text()[-2000:]}"

    def end(self) -> None:
        """End all processes of this stack by their pids, and remove its files and shared memory."""
        if self._api is not None:
            self._api.close()

        kill_all_with(f"{SHM_DIR_VARIABLE}={self.shm_dir}")
        for started in (*self.hosts.values(), *self.parts.values()):
            if started.process is not None:
                started.process.wait(DEADLINE_S)
        shutil.rmtree(self.shm_dir)
        shutil.rmtree(self.root)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    reference = Reference(tmp_path_factory.mktemp("reference"))
    yield reference
    reference.end()


@pytest.fixture(scope="session")
def make_part() -> Callable[..., Part]:
    def make(stack: Stack, name: str, *, folder: str = "supervisor") -> Part:
        return Part(stack.root, name, stack.environment, folder=folder)

    return make


@pytest.fixture(scope="module")
def make_stack() -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(**settings: str) -> Stack:
        made.append(Stack(**settings))
        return made[-1]

    yield make
    for stack in made:
        stack.end()
