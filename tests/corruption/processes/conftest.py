"""Two hosts with real engines and trainers that can be stopped exactly at a fault point, and killed there.

Engines and trainers are forked from two processes that have imported everything, so that a restart is cheap.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points, wire
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, branch, is_alive
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.engine_wire import Arm, Configure, EngineReply, Flush, GetStatus
from flyball.contracts.on_host.segments import rank_segment, shm_prefix
from services.rules.recovery_point import plan_restore

JOB = "job"
DEADLINE_S = 120.0
HOSTS = ("a", "b")  # rank 0 is on a, rank 1 on b

FORKER = """
import json, os, signal, sys
exec(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        try:
            run(*request["arguments"])
        finally:
            sys.stderr.flush()
            os._exit(1)
    print(pid, flush=True)
"""
ENGINE = """
import socket, threading
from ckpt_engine.tiers import durable_files
from ckpt_engine.host import emergency
from ckpt_engine.host import job
from ckpt_engine.host import server
from flyball.contracts import fault_points

broken = set()  # system calls that fail for files on disks

class Os:
    def __getattr__(self, name):
        if name in broken:
            raise OSError(5, "Input/output error")
        return getattr(os, name)

durable_files.os = Os()

def arm(sock):
    while True:
        received, asker = sock.recvfrom(256)
        what, _, name = received.decode().partition(" ")
        if what == "stop":
            os.environ[fault_points.VARIABLE] = name
            fault_points.rearm()
        elif what == "break":
            broken.add(name)
        else:
            broken.discard(name)
        try:
            sock.sendto(b"done", asker)
        except OSError:
            pass  # this process was stopped before it could answer, and who asked has seen that

def run(arm_path, *arguments):
    fault_points.rearm()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(arm_path)
    threading.Thread(target=arm, args=(sock,), daemon=True).start()
    server.main(arguments)
"""
TRAINER = """
import torch, flyball
from ckpt_engine.trainer.capture import capturer
from ckpt_engine.trainer.capture import optimizer_watch
from ckpt_engine.trainer.restore import load_shard as restore
torch.set_num_threads(1)

def state_of(step, rank):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return {"w": torch.randn(60_000, generator=generator), "b": torch.randn(7, generator=generator), "at": (step, rank)}

def same(one, other):
    return one["at"] == other["at"] and all(torch.equal(one[name], other[name]) for name in "wb")

def run(result_file):
    job = flyball.attach()
    state = {"w": torch.zeros(60_000), "b": torch.zeros(7), "at": ()}
    start = job.restore(state)
    right = start == 0 or same(state, state_of(start - 1, job.rank))
    with open(result_file + ".new", "w") as file:
        json.dump({"start": start, "right": right}, file)
    os.rename(result_file + ".new", result_file)
    for step in range(start, 90_000):  # on and on; far below the step that `arm_ranks` names
        state = state_of(step, job.rank)
        job.save(step, state).replicated.wait(0.05)
"""


def wait_until(what: str, condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - what made it true
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.002)
    return found


class Forker:
    """A process that forks others."""

    def __init__(self, prelude: str, disks: Mapping[Path, str]) -> None:
        """`disks`: folders that are separate file systems for these processes, with their sizes."""
        mounts = [f"mount -t tmpfs -o size={size},mode=700 none {folder} || exit 77" for folder, size in disks.items()]
        private = ["unshare", "-m", "--propagation", "private", "sh", "-c", "; ".join([*mounts, 'exec "$@"']), "sh"]
        self._process = subprocess.Popen(
            [*(private if disks else ()), sys.executable, "-P", "-c", FORKER, prelude],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> Forker:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            pytest.skip("a tmpfs cannot be mounted here")
        return self

    def seen(self, path: Path) -> Path:
        """The path as these processes see it."""
        return Path(f"/proc/{self._process.pid}/root{path}")

    def fork(self, log: Path, environment: dict[str, str], *arguments: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"log": str(log), "environment": environment, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()


def state_in_kernel(pid: int) -> str:
    """One letter; '' once it is gone with all its threads: until then it may hold locks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stands_still(pid: int) -> bool:
    """Wait until every thread of a process is stopped: each runs on until it receives the signal itself."""
    try:
        stats = [thread.joinpath("stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread ended meanwhile
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


class Host:
    def __init__(self, root: Path, name: str, rank: int, engines: Forker, trainers: Forker) -> None:
        self.name, self.rank = name, rank
        self.state_dir = root / name
        self.engines = engines
        self._root, self._trainers = root, trainers
        (root / "shm").mkdir(exist_ok=True)
        self.prefix = shm_prefix(str(self.state_dir.resolve()), str(root / "shm"))
        self.token = root / "token"
        self.token.write_text("a token of the test\n")
        self.engine = self.trainer = 0

    def start_engine(self) -> None:
        arm = self._root / f"{self.name}.arm"
        arm.unlink(missing_ok=True)
        environment = {
            "FLYBALL_SHM_DIR": str(self._root / "shm"),
            # A delayed peer is alive: no step that both ranks may have committed is given up because of it.
            **{f"FLYBALL_CKPT_{name}_TIMEOUT_S": "60" for name in ("IO", "HANDSHAKE", "PING")},
            "FLYBALL_CKPT_REPLICATE_TIMEOUT_S": "600",
            "FLYBALL_CKPT_SEAL_TIMEOUT_S": "0.5",  # how long a world manifest is retried; no step is named meanwhile
            fault_points.VARIABLE: "",
        }
        self.engine = self.engines.fork(
            self._root / f"{self.name}.log",
            environment,
            *(str(arm), "--state-dir", str(self.state_dir), "--host-id", self.name),
            *("--address", "127.0.0.1", "--token-file", str(self.token)),
        )
        wait_until("the engine answers", self.answers)

    def answers(self) -> bool:
        with suppress(OSError, struct.error):
            # In touch with a supervisor: out of touch, a step stays in a store for minutes after it was the newest.
            return self.ask(GetStatus(in_touch_until_s=time.monotonic() + 3600.0, clean_steps={})).ok
        assert state_in_kernel(self.engine), (self._root / f"{self.name}.log").read_text()[-3000:]
        return False

    def control_engine(self, what: str) -> None:
        """`stop POINT:1:SIGSTOP`, `break CALL` (a system call fails from now on), `mend CALL`. Returns when it is in
        effect, or the engine is stopped already."""
        sender = self._root / f"{self.name}.sender"
        sender.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(str(sender))
            sock.sendto(what.encode(), str(self._root / f"{self.name}.arm"))

            def is_done() -> bool:
                with suppress(BlockingIOError):
                    return bool(sock.recv(16, socket.MSG_DONTWAIT))
                return state_in_kernel(self.engine) == "T"

            wait_until(f"the engine does {what}", is_done)

    def ask(self, request: object) -> EngineReply:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(self.state_dir / "engine.sock"))
            data = wire.encode(request)
            sock.sendall(struct.pack("<I", len(data)) + data)
            with sock.makefile("rb") as reader:
                (length,) = struct.unpack("<I", reader.read(4))
                return wire.decode(reader.read(length), EngineReply, max_bytes=16 << 20)

    def ask_and_forget(self, request: object) -> None:
        """The reply may never come."""

        def ask() -> None:
            with suppress(OSError, struct.error):
                self.ask(request)

        threading.Thread(target=ask, daemon=True).start()

    def segments(self) -> RankSegments:
        return RankSegments.open(rank_segment(self.prefix, JOB, self.rank))


class Site:
    """The job on its hosts. Each generation resumes where the one before was killed."""

    def __init__(self, root: Path, disks: Mapping[str, str] | None = None) -> None:
        self.root = root
        folders = {root / name: size for name, size in (disks or {}).items()}
        for folder in folders:
            folder.mkdir()
        self._engines, self._trainers = Forker(ENGINE, folders), Forker(TRAINER, {})  # both import at the same time
        forkers = self._engines.ready(), self._trainers.ready()
        self.hosts = {name: Host(root, name, rank, *forkers) for rank, name in enumerate(HOSTS)}
        self.spec = CheckpointSpec(
            disk_dir=str(root / "disk"),
            disk_every_steps=1,
            persistent_dir=str(root / "store"),
            persistent_every_steps=1,
            restore_timeout_s=DEADLINE_S,
        )
        self.lineage: Lineage = (LineageEntry(1),)
        self.plan: RestorePlan | None = None
        for host in self.hosts.values():
            host.start_engine()

    @property
    def generation(self) -> int:
        return self.lineage[-1].generation

    def begin(self, trainer_faults: dict[str, str] | None = None) -> None:
        """Configure the generation and start its trainers. Returns when each has restored."""
        parts = tuple(
            HostRanks(host.name, "127.0.0.1", host.ask(GetStatus()).address, (host.rank,))
            for host in self.hosts.values()
        )
        placement = Placement(
            *(JOB, self.generation, 2, parts, "127.0.0.1", 1, {"a": ("b",), "b": ("a",)}), self.lineage, self.plan
        )
        for host in self.hosts.values():
            assert host.ask(Configure(Fence(1, self.generation), host.name, placement, self.spec)).ok
        for host in self.hosts.values():
            host.trainer = self._fork_trainer(host, (trainer_faults or {}).get(host.name, ""))
        for host in self.hosts.values():
            found = wait_until(f"rank {host.rank} has restored", lambda host=host: self._result(host))
            assert found == {"start": self.plan.step + 1 if self.plan else 0, "right": True}

    def _fork_trainer(self, host: Host, fault: str) -> int:
        environment = {
            worker_env.JOB: JOB,
            worker_env.GENERATION: str(self.generation),
            worker_env.SHM_PREFIX: host.prefix,
            worker_env.ENGINE_NOTIFY: str(host.state_dir / "notify.sock"),
            worker_env.RESTORE_STEP: str(self.plan.step) if self.plan else "",
            worker_env.CHECKPOINT: msgspec.json.encode(self.spec).decode(),
            worker_env.LINEAGE: msgspec.json.encode(self.lineage).decode(),
            fault_points.VARIABLE: fault,
            **{"RANK": str(host.rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
        }
        log = self.root / f"trainer{host.rank}.log"
        return self._trainers.fork(log, environment, str(self._result_file(host)))

    def _result_file(self, host: Host) -> Path:
        return self.root / f"restored-g{self.generation}-r{host.rank}"

    def _result(self, host: Host) -> dict[str, Any] | None:
        try:
            return json.loads(self._result_file(host).read_text())
        except FileNotFoundError:
            assert state_in_kernel(host.trainer), (self.root / f"trainer{host.rank}.log").read_text()[-3000:]
            return None

    def train_until(self, steps: int) -> None:
        """Wait until the world has so many steps of this generation."""
        wanted = (self.plan.step if self.plan else -1) + steps
        wait_until(f"world step {wanted}", lambda: self.world_step() >= wanted)

    def world_step(self) -> int:
        newest = -1
        for host in self.hosts.values():
            with suppress(FileNotFoundError):
                segments = host.segments()
                world = segments.read_world()
                if world.generation == self.generation:
                    newest = max(newest, world.step)
                segments.close()
        return newest

    def committed(self) -> int:
        """The newest step that both ranks have committed in their slots, or the world step."""
        common: set[int] | None = None
        for host in self.hosts.values():
            segments = host.segments()
            steps = {
                view.step
                for view in segments.slots()
                if view.state is SlotState.COMMITTED and is_alive(view.generation, view.step, self.lineage)
            }
            segments.close()
            common = steps if common is None else common & steps
        return max(self.world_step(), *(common or {-1}))

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until("they are dead", lambda: not any(state_in_kernel(pid) for pid in pids))

    def recover(self) -> int:
        """Do what daemons and controller do after a failure. Returns the step that training resumes from."""
        self.kill(*(host.trainer for host in self.hosts.values()))
        for host in self.hosts.values():
            if not state_in_kernel(host.engine):
                host.start_engine()
        copies = [copy for host in self.hosts.values() for copy in host.ask(Flush(JOB, 60.0)).copies]
        addresses = {host.name: host.ask(GetStatus()).address for host in self.hosts.values()}
        parts = [HostRanks(host.name, "127.0.0.1", addresses[host.name], (host.rank,)) for host in self.hosts.values()]
        self.plan = plan_restore(copies, self.lineage, 2, addresses, parts)
        assert self.plan is not None
        self.lineage = branch(self.lineage, restored_step=self.plan.step, generation=self.generation + 1)
        return self.plan.step

    @contextmanager
    def engines_stopped(self) -> Iterator[None]:
        """Keep files from changing: otherwise engines write and remove steps between two listings."""
        engines = [host.engine for host in self.hosts.values()]
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until("they stand still", lambda: all(stands_still(pid) for pid in engines))
            yield
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)

    def arm_ranks(self, host: Host) -> None:
        host.ask_and_forget(Arm(Fence(1, self.generation), JOB, 100_000))

    def status(self) -> list[EngineReply]:
        return [host.ask(GetStatus()) for host in self.hosts.values()]

    def durable_step(self) -> int:
        """The newest step that both ranks have on a slow tier."""
        steps = []
        for host in self.hosts.values():
            segments = host.segments()
            steps.append(segments.control.durable_step(self.generation))
            segments.close()
        return min(steps)

    def close(self) -> None:
        for host in self.hosts.values():
            for pid in (host.trainer, host.engine):
                if pid and state_in_kernel(pid):
                    os.kill(pid, signal.SIGKILL)
        self._engines.close()
        self._trainers.close()


@contextmanager
def made_site(disks: Mapping[str, str] | None = None) -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="flyball-kills-"))  # short: a Unix socket's path is limited
    made: list[Site] = []
    try:
        made.append(Site(root, disks))
        yield made[0]
    finally:
        for site in made:
            site.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with made_site() as made:
        yield made


@pytest.fixture
def site_with_small_disks() -> Iterator[Site]:
    with made_site({"disk": "4m", "store": "4m"}) as made:
        yield made


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def in_kernel() -> Callable[[int], str]:
    return state_in_kernel
