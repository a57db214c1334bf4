"""Two hosts with real engines and trainers that can be stopped exactly at a fault point, and killed there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from support.clocks.waits import until
from support.hosts.engines import JOB, EngineHost
from support.hosts.forked import ENGINE, TRAINER, Forker, stands_still, state_in_kernel

from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, branch, is_alive
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.engine_wire import Arm, Configure, EngineReply, Flush, GetStatus
from flyball.contracts.on_host.segments import rank_segment
from services.rules.recovery_point import plan_restore

HOSTS = ("a", "b")  # rank 0 is on a, rank 1 on b


class ForkedHost(EngineHost):
    def __init__(self, root: Path, name: str, rank: int, engines: Forker) -> None:
        # How long a world manifest is retried; no step is named meanwhile.
        super().__init__(root, name, "a token of the test", {"FLYBALL_CKPT_SEAL_TIMEOUT_S": "0.5"})
        self.name, self.rank = name, rank
        self.engines = engines
        self._root = root
        self.engine = self.trainer = 0

    def start_engine(self) -> None:
        arm = self._root / f"{self.name}.arm"
        arm.unlink(missing_ok=True)
        environment = {"FLYBALL_SHM_DIR": str(self.shm_dir), **self.environment, fault_points.VARIABLE: ""}
        self.engine = self.engines.fork(self.log_path, environment, str(arm), *self.arguments())
        until(self.answers, "the engine answers")

    def answers(self) -> bool:
        with suppress(OSError, struct.error):
            # In touch with a supervisor: out of touch, a step stays in a store for minutes after it was the newest.
            return self.ask(GetStatus(in_touch_until_s=time.monotonic() + 3600.0, clean_steps={})).ok
        assert state_in_kernel(self.engine), self.log_path.read_text()[-3000:]
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

            until(is_done, f"the engine does {what}")

    def ask_and_forget(self, request: object) -> None:
        """The reply may never come."""

        def ask() -> None:
            with suppress(OSError, struct.error):
                self.ask(request)

        threading.Thread(target=ask, daemon=True).start()

    def rank_segments(self) -> RankSegments:
        return RankSegments.open(rank_segment(self.prefix, JOB, self.rank))


class ForkedSite:
    """The job on its hosts. Each generation resumes where the one before was killed."""

    def __init__(self, root: Path, disks: Mapping[str, str] | None = None) -> None:
        self.root = root
        folders = {root / name: size for name, size in (disks or {}).items()}
        for folder in folders:
            folder.mkdir()
        self._engines, self._trainers = Forker(ENGINE, folders), Forker(TRAINER, {})  # both import at the same time
        self._engines.ready()
        self._trainers.ready()
        self.hosts = {name: ForkedHost(root, name, rank, self._engines) for rank, name in enumerate(HOSTS)}
        self.spec = CheckpointSpec(
            disk_dir=str(root / "disk"),
            disk_every_steps=1,
            persistent_dir=str(root / "store"),
            persistent_every_steps=1,
            restore_timeout_s=120.0,
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
            found = until(lambda host=host: self._result(host), f"rank {host.rank} has restored")
            assert found == {"start": self.plan.step + 1 if self.plan else 0, "right": True}

    def _fork_trainer(self, host: ForkedHost, fault: str) -> int:
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

    def _result_file(self, host: ForkedHost) -> Path:
        return self.root / f"restored-g{self.generation}-r{host.rank}"

    def _result(self, host: ForkedHost) -> dict[str, Any] | None:
        try:
            return json.loads(self._result_file(host).read_text())
        except FileNotFoundError:
            assert state_in_kernel(host.trainer), (self.root / f"trainer{host.rank}.log").read_text()[-3000:]
            return None

    def train_until(self, steps: int) -> None:
        """Wait until the world has so many steps of this generation."""
        wanted = (self.plan.step if self.plan else -1) + steps
        until(lambda: self.world_step() >= wanted, f"world step {wanted}")

    def world_step(self) -> int:
        newest = -1
        for host in self.hosts.values():
            with suppress(FileNotFoundError):
                segments = host.rank_segments()
                world = segments.read_world()
                if world.generation == self.generation:
                    newest = max(newest, world.step)
                segments.close()
        return newest

    def committed(self) -> int:
        """The newest step that both ranks have committed in their slots, or the world step."""
        common: set[int] | None = None
        for host in self.hosts.values():
            segments = host.rank_segments()
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
        until(lambda: not any(state_in_kernel(pid) for pid in pids), "they are dead")

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
            until(lambda: all(stands_still(pid) for pid in engines), "they stand still")
            yield
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)

    def arm_ranks(self, host: ForkedHost) -> None:
        host.ask_and_forget(Arm(Fence(1, self.generation), JOB, 100_000))

    def status(self) -> list[EngineReply]:
        return [host.ask(GetStatus()) for host in self.hosts.values()]

    def durable_step(self) -> int:
        """The newest step that both ranks have on a slow tier."""
        steps = []
        for host in self.hosts.values():
            segments = host.rank_segments()
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
def made_site(disks: Mapping[str, str] | None = None) -> Iterator[ForkedSite]:
    root = Path(tempfile.mkdtemp(prefix="flyball-kills-"))  # short: a Unix socket's path is limited
    made: list[ForkedSite] = []
    try:
        made.append(ForkedSite(root, disks))
        yield made[0]
    finally:
        for site in made:
            site.close()
        shutil.rmtree(root, ignore_errors=True)
