"""Runs real engine processes, configured as by a daemon, and jobs that save with them. No daemon runs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

import flyball
from checkpoint_bench.measure import wait_until
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, ShardSource, Tier, branch
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.engine_wire import (
    ENGINE_SOCKET,
    MAX_ENGINE_FRAME_BYTES,
    NOTIFY_SOCKET,
    Configure,
    EngineReply,
    GetStatus,
)
from flyball.contracts.on_host.segments import beacon_path, shm_prefix
from flyball.sdk.beacon import create_beacon
from flyball.sdk.trainer import Job, SaveHandle

_FOLDER = re.compile(r"fbb-([0-9]+)-.+")


def folder_prefix() -> str:
    """Return the prefix of this process's folders; short, since a Unix socket's path is limited."""
    return f"fbb-{os.getpid()}-"


def segments_of(state_dir: Path) -> list[Path]:
    """Return the shared-memory files of the engine with this state folder."""
    prefix = Path(shm_prefix(str(state_dir.resolve())))
    return sorted(path for path in prefix.parent.glob(prefix.name + ".*") if not path.is_dir())


def remove_leftovers(folder: Path) -> None:
    """Remove the folders below `folder` of this user's dead processes, and the slots of their engines."""
    for found in folder.glob("fbb-*-*"):
        named = _FOLDER.fullmatch(found.name)
        if named is None or _is_alive(int(named[1])) or found.lstat().st_uid != os.getuid():
            continue
        for state_dir in found.iterdir():
            for segment in segments_of(state_dir):
                segment.unlink(missing_ok=True)
        shutil.rmtree(found, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] not in ("Z", "X")  # a zombie is dead, too


JOB = "checkpoint-benchmark"
_ASK_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


class EngineHost:
    """A state folder and its engine process."""

    def __init__(self, root: Path, host_id: str) -> None:
        self.host_id = host_id
        self.state_dir = (root / host_id).resolve()
        self.prefix = shm_prefix(str(self.state_dir))
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self._root / f"{self.host_id}.log"

    def start(self) -> None:
        token = self._root / "token"
        token.write_text("of this benchmark\n", encoding="ascii")
        # It ends with this process, even if that is killed.
        command = [sys.executable, "-P", "-m", "flyball.cli.run.tied", str(os.getpid()), "ckpt_engine.host.server"]
        command += ["--state-dir", str(self.state_dir)]
        command += ["--host-id", self.host_id, "--address", "127.0.0.1", "--token-file", str(token)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, start_new_session=True)
        wait_until(self._answers, f"the engine of {self.host_id}", 30.0)

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"the engine of {self.host_id} ended:\n{self.log.read_text(encoding='utf-8')}")
        try:
            return self.ask(GetStatus()).ok
        except OSError:
            return False

    def ask(self, request: object) -> EngineReply:
        with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as reader:
            sock.settimeout(_ASK_TIMEOUT_S)
            sock.connect(str(self.state_dir / ENGINE_SOCKET))
            data = wire.encode(request)
            sock.sendall(struct.pack("<I", len(data)) + data)
            (length,) = struct.unpack("<I", reader.read(4))
            return wire.decode(reader.read(length), EngineReply, max_bytes=MAX_ENGINE_FRAME_BYTES)

    def ask_counters(self) -> dict[str, int]:
        return dict(self.ask(GetStatus()).counters)

    def segments(self) -> list[Path]:
        return segments_of(self.state_dir)

    def lose_memory(self) -> None:
        """Restart as after a reboot: a new engine without slots; files on disk stay."""
        self.end()
        self.start()

    def end(self) -> None:
        """End the engine and remove its slots."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for path in self.segments():
            path.unlink(missing_ok=True)


class Cluster:
    """Engines on loopback, one rank each, and the generations of one job on them."""

    def __init__(self, root: Path, hosts: int, spec: CheckpointSpec) -> None:
        self.root = root
        self.hosts = [EngineHost(root, f"host{index}") for index in range(hosts)]
        self.spec = spec
        self.generation = 0
        self._lineage: tuple[LineageEntry, ...] = ()

    def start(self) -> None:
        for host in self.hosts:
            host.start()

    def begin(self, restore_step: int | None = None, *, written_by: int = 0, source: Tier = Tier.MEMORY) -> list[Job]:
        """Begin a new generation, from scratch or from a step that generation `written_by` wrote and every host has in
        `source`. Return one job for each rank."""
        self.generation += 1
        self._lineage = branch(self._lineage, restored_step=restore_step, generation=self.generation)
        restore = None if restore_step is None else self._restore_plan(restore_step, written_by, source)
        names = [host.host_id for host in self.hosts]
        placement = Placement(
            job=JOB,
            generation=self.generation,
            world_size=len(self.hosts),
            hosts=tuple(HostRanks(h.host_id, "127.0.0.1", self._address(h), (i,)) for i, h in enumerate(self.hosts)),
            master_address="127.0.0.1",
            master_port=1,
            peers={name: (names[i - 1],) for i, name in enumerate(names)} if len(names) > 1 else {},
            lineage=self._lineage,
            restore=restore,
        )
        for host in self.hosts:
            reply = host.ask(Configure(Fence(1, self.generation), host.host_id, placement, self.spec))
            if not reply.ok:
                raise RuntimeError(f"{host.host_id} refused its configuration: {reply.code} {reply.message}")
        return [self._attach(rank, restore_step) for rank in range(len(self.hosts))]

    def _restore_plan(self, step: int, generation: int, tier: Tier) -> RestorePlan:
        return RestorePlan(
            step,
            {
                str(rank): (ShardSource(rank, generation, tier, host.host_id, self._address(host)),)
                for rank, host in enumerate(self.hosts)
            },
        )

    @staticmethod
    def _address(host: EngineHost) -> str:
        return host.ask(GetStatus()).address

    def _attach(self, rank: int, restore_step: int | None) -> Job:
        host = self.hosts[rank]
        beacon = beacon_path(host.prefix, JOB, self.generation, rank)
        create_beacon(beacon)
        variables = {
            worker_env.JOB: JOB,
            worker_env.GENERATION: str(self.generation),
            worker_env.HOST_ID: host.host_id,
            worker_env.BEACON: beacon,
            worker_env.SHM_PREFIX: host.prefix,
            worker_env.ENGINE_NOTIFY: str(host.state_dir / NOTIFY_SOCKET),
            worker_env.RESTORE_STEP: "" if restore_step is None else str(restore_step),
            worker_env.CHECKPOINT: msgspec.json.encode(self.spec).decode(),
            worker_env.LINEAGE: msgspec.json.encode(self._lineage).decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_WORLD_SIZE": "1",
        }
        with _environment(variables):
            return flyball.attach()

    def end(self) -> None:
        for host in self.hosts:
            host.end()


@contextmanager
def cluster(hosts: int, spec: CheckpointSpec) -> Iterator[Cluster]:
    """Run engines; at the end, stop them and remove all their files."""
    root = Path(tempfile.mkdtemp(prefix=folder_prefix()))
    made = Cluster(root, hosts, spec)
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_SETTLE_TIMEOUT_S = 120.0


class Saver:
    """Saves consecutive steps of one job. A failed save ends the benchmark: there would be nothing to measure."""

    def __init__(self, job: Job, state: dict[str, object], first_step: int = 0) -> None:
        self.job = job
        self.state = state
        self.next_step = first_step

    def save(self) -> SaveHandle:
        handle = self.job.save(self.next_step, self.state)
        self.next_step += 1
        if handle.error or handle.skipped:
            raise RuntimeError(f"step {handle.step} was not saved: {handle.error or handle.skipped}")
        return handle

    def settle(self, handle: SaveHandle, *, durable: bool = False) -> None:
        """Wait until a save is complete: committed, replicated, and the recovery point."""
        stage = handle.durable if durable else handle.replicated
        wait_until(lambda: stage.done or handle.error, f"step {handle.step}", _SETTLE_TIMEOUT_S)
        handle.check()
        wait_until(lambda: self.job.recovery_point >= handle.step, f"world step {handle.step}", _SETTLE_TIMEOUT_S)

    def warm_up(self, saves: int, *, durable: bool = False) -> None:
        """Fill every slot once, so that none is created during a measurement."""
        for _ in range(saves):
            self.settle(self.save(), durable=durable)
