"""One host with an engine and a trainer for its one rank, for one test after the other.

`python tests/rdma/engine_site.py HOST_ID ADDRESS` serves it over XML-RPC, on this or on another virtual machine; it
prints its port.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from xmlrpc.server import SimpleXMLRPCServer

sys.path.append(str(Path(__file__).parents[1]))  # tests are not packages: find the modules there by path

import msgspec
import numpy as np
import xxhash
from safetensors.numpy import save
from support.clocks.waits import DEADLINE_S, until
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.host import server as engine_server
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import wire
from flyball.contracts.checkpoints import Lineage, Tier
from flyball.contracts.on_host.engine_wire import Configure, EngineReply
from flyball.contracts.on_host.segments import replica_segment

JOB = "job"
PORTS = {"a": 21001, "b": 21002}
TOKEN = "a token of the test"
WORDS = 1 << 18  # of a MiB


class SiteSettings(msgspec.Struct):
    """`changes`: of the shard's MiBs every so many-th differs from step to step."""

    environment: dict[str, str] = {}  # of the engine
    mib: int = 4
    changes: int = 1


def shard(rank: int, step: int, mib: int, changes: int = 1) -> bytes:
    """The bytes that a rank saves. No MiB equals another one."""
    values = np.empty((mib, WORDS), np.uint32)
    values[:] = np.random.default_rng([rank]).integers(1 << 32, size=WORDS, dtype=np.uint32)
    values[::changes] = np.random.default_rng([rank, step]).integers(1 << 32, size=WORDS, dtype=np.uint32)
    values[:, 0] = np.arange(mib)
    return save({"values": values, "step": np.array([step])})


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class SiteTrainer(Trainer):
    settings: SiteSettings

    def payload(self, step: int, count: int = 0) -> bytes:
        del count
        return shard(self.rank, step, self.settings.mib, self.settings.changes)


class ForkedEngine:
    """An engine's process, forked from this one: to import what it needs takes an emulated processor ten seconds."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log_path: Path) -> None:
        self._exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
                os.environ.clear()
                os.environ.update(environment)
                os._exit(engine_server.main(arguments))
            finally:
                traceback.print_exc()
                os._exit(1)

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self) -> int | None:
        until(lambda: self.poll() is not None)
        return self._exit_code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class SiteEngine(EngineHost):
    def start(self, **environment: str) -> EngineHost:
        env = {**os.environ, "FLYBALL_SHM_DIR": str(self.shm_dir), **self.environment, **environment}
        port = () if self.state_dir.exists() else ("--port", self._first_port)
        arguments = self.arguments(*port)
        self.process = ForkedEngine(arguments, env, self.log_path)  # type: ignore[assignment]  # as much of a Popen as is used
        until(lambda: self._answers() or self.process is None or self.process.poll() is not None)
        assert self.process is not None and self.process.poll() is None, self.log_path.read_text()
        return self


class EngineSite:
    """Arguments and results are what XML-RPC knows: texts and small numbers."""

    def __init__(self, host_id: str, address: str) -> None:
        self._host_id, self._address = host_id, address
        self._trainer: SiteTrainer | None = None

    def open(self, settings: str) -> bool:
        """For a test; `settings` is JSON of SiteSettings."""
        self._settings = msgspec.json.decode(settings, type=SiteSettings)
        self._root = Path(tempfile.mkdtemp(prefix="site-", dir="/dev/shm"))
        environment, port = self._settings.environment, PORTS[self._host_id]
        self._host = SiteEngine(self._root, self._host_id, TOKEN, environment, address=self._address, port=port)
        return True

    def start(self) -> str:
        """Start the engine. Returns its address."""
        return self._host.start().address

    def configure(self, configure: str) -> bool:
        return self._host.ask(wire.decode(configure, Configure)).ok

    def train(self, rank: int, generation: int, lineage: str) -> bool:
        """A trainer attaches for this rank."""
        self._trainer = SiteTrainer(self._host, rank, generation, wire.decode(lineage, Lineage))
        self._trainer.settings = self._settings
        return True

    def save(self, step: int) -> bool:
        """False if no slot became free for it."""
        return self._becomes(lambda: self.trainer.try_save(step), DEADLINE_S)

    def await_world_step(self, step: int, within_s: float = DEADLINE_S) -> bool:
        """Whether it came in time."""
        return self._becomes(lambda: self.trainer.world_step >= step, within_s)

    def await_restore(self, generation: int) -> str:
        return self.trainer.await_restore(generation).name

    def digest(self, generation: int, step: int) -> str:
        """Of the rank's committed slot with this step; '' without one."""
        stored = self.trainer.stored(generation, step)
        return "" if stored is None else digest(stored)

    def replicas(self, rank: int) -> list[tuple[int, str]]:
        """Of another host's rank: the step and the digest of every slot that counts, read from the memory itself."""
        segments = self._replica(rank)
        return [] if segments is None else [
            (view.step, digest(segments.payload(view.index)))
            for view in segments.slots()
            if view.state is SlotState.COMMITTED
        ]  # fmt: skip

    def has_torn_replica(self, rank: int) -> bool:
        """Whether a slot is half-written."""
        segments = self._replica(rank)
        return segments is not None and any(view.state is SlotState.WRITING for view in segments.slots())

    def held_steps(self, rank: int) -> list[int]:
        """The steps of another host's rank that the engine says it holds."""
        return sorted(
            copy.step for copy in self._host.status.copies if (copy.tier, copy.rank) == (Tier.PEER, rank)
        )  # fmt: skip

    def status(self) -> str:
        return wire.encode(self._host.status).decode()

    def logged(self, event: str) -> list[dict[str, str]]:
        return [{name: str(value) for name, value in line.items()} for line in self._host.logged(event)]

    def save_and_time(self, step: int) -> float:
        """The seconds from the end of the save until all ranks have the step, with its replicas."""
        self.save(step)
        began = time.monotonic()
        until(lambda: self.trainer.world_step >= step)
        return time.monotonic() - began

    def save_and_kill(self, step: int, pause_s: float) -> bool:
        """SIGKILL to the engine at that moment after the save."""
        saved = self.save(step)
        time.sleep(pause_s)
        self._host.kill()
        return saved

    def lose(self) -> bool:
        """The host is lost: its engine, its slots and its state folder."""
        self._host.lose()
        return not self._host.segments()

    def close(self) -> str:
        """End it. Returns the engine's log."""
        if self._host.process is not None and self._host.process.poll() is None:
            self._host.kill()
        logged = self._host.log_path.read_text(errors="replace") if self._host.log_path.exists() else ""
        shutil.rmtree(self._root)
        self._trainer = None
        return logged

    @property
    def trainer(self) -> SiteTrainer:
        assert self._trainer is not None
        return self._trainer

    def _replica(self, rank: int) -> RankSegments | None:
        base = replica_segment(self._host.prefix, JOB, rank)
        return RankSegments.open(base) if Path(base + ".ctl").exists() else None

    def _becomes(self, condition: object, within_s: float) -> bool:
        try:
            until(condition, within_s)  # type: ignore[arg-type]
        except AssertionError:
            return False
        return True


def status_of(site: EngineSite) -> EngineReply:
    return wire.decode(site.status(), EngineReply)


def serve(host_id: str, address: str) -> None:
    with SimpleXMLRPCServer((address, 0), logRequests=False) as server:
        server.register_introspection_functions()
        server.register_instance(EngineSite(host_id, address))
        print(f"port {server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
