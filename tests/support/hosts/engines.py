"""Real engine processes on this machine, each with its own state folder, and trainers without torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from support.clocks.waits import DEADLINE_S, until

from ckpt_engine.contracts.control_views import NOTHING_KEPT, RestoreState
from ckpt_engine.contracts.notices import Captured
from ckpt_engine.rules.slot_rules import SlotState, choose_slot
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import fault_points, wire
from flyball.contracts.checkpoints import Lineage, LineageEntry, Tier
from flyball.contracts.on_host.engine_wire import EngineReply, GetStatus
from flyball.contracts.on_host.segments import rank_segment, shm_prefix

JOB = "job"
# On a busy machine a delayed peer is still alive: no step is given up, no source skipped and nothing offered twice
# because of it. Tests of timeouts set their own.
PATIENT = {
    f"FLYBALL_CKPT_{name}_TIMEOUT_S": seconds
    for name, seconds in {
        **{"REPLICATE": "600", "IO": "60", "HANDSHAKE": "60", "PING": "60"},
        "DRAIN": "60",
    }.items()
}


class EngineHost:
    """One host: a state folder and the engine process that uses it."""

    def __init__(
        self,
        root: Path,
        host_id: str,
        token: str,
        environment: Mapping[str, str],
        *,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`port` 0: one of the loopback interface that stays free meanwhile."""
        self.host_id = host_id
        self._ip = address
        self.state_dir = root / host_id
        self.shm_dir = root / "shm"
        self.shm_dir.mkdir(exist_ok=True)
        self.prefix = shm_prefix(str(self.state_dir.resolve()), str(self.shm_dir))
        self.token_file = root / f"{host_id}.token"
        self.token_file.write_text(token + "\n")
        self.environment = {**PATIENT, **environment}
        self.log_path = root / f"{host_id}.log"
        self.process: subprocess.Popen[bytes] | None = None
        if not port:
            from support.servers.own_servers import (
                free_port,  # only here: it takes a while, and not every machine has what it needs
            )

            port = free_port()
        self._first_port = str(port)  # a later start uses it again

    def command(self, *extra: str) -> list[str]:
        return [sys.executable, "-P", "-m", "ckpt_engine.host.server", *self.arguments(*extra)]

    def arguments(self, *extra: str) -> list[str]:
        return [
            *("--state-dir", str(self.state_dir), "--host-id", self.host_id, "--address", self._ip),
            *("--token-file", str(self.token_file), *extra),
        ]

    def start(self, **environment: str) -> EngineHost:
        env = {**os.environ, "FLYBALL_SHM_DIR": str(self.shm_dir), **self.environment, **environment}
        port = () if self.state_dir.exists() else ("--port", self._first_port)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.command(*port), env=env, stderr=log, start_new_session=True)
        until(lambda: self._answers() or self.process is None or self.process.poll() is not None)
        may_be_killed = fault_points.VARIABLE in environment  # at what its last life left to do, before it answers
        assert self.process.poll() in (None, *([-signal.SIGKILL] if may_be_killed else [])), self.log_path.read_text()
        return self

    def _answers(self) -> bool:
        try:
            return self.ask(GetStatus()).ok
        except (OSError, struct.error):  # not there yet, or killed before it could reply
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def lose(self) -> None:
        """The host is lost: engine, segments and state folder."""
        self.kill()
        for path in self.segments():
            path.unlink()
        shutil.rmtree(self.state_dir)

    def segments(self) -> list[Path]:
        """Its files in shared memory, without folders in which it restores."""
        return sorted(path for path in self.shm_dir.glob(Path(self.prefix).name + ".*") if path.is_file())

    def ask(self, request: object) -> EngineReply:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(self.state_dir / "engine.sock"))
            data = wire.encode(request)
            sock.sendall(struct.pack("<I", len(data)) + data)
            reader = sock.makefile("rb")
            (length,) = struct.unpack("<I", reader.read(4))
            return wire.decode(reader.read(length), EngineReply, max_bytes=16 << 20)

    @property
    def status(self) -> EngineReply:
        """As a daemon asks to which the supervisor has said that no step is suspect."""
        return self.ask(GetStatus(clean_steps={}))

    def stays_in_touch(self) -> None:
        """The supervisor answers from now on: no step stays in the store because others may have found it there."""
        self.ask(GetStatus(in_touch_until_s=time.monotonic() + 3600.0, clean_steps={}))

    @property
    def address(self) -> str:
        return self.status.address

    def holds(self, tier: Tier, step: int, rank: int) -> bool:
        return any((copy.tier, copy.step, copy.rank) == (tier, step, rank) for copy in self.status.copies)

    def logged(self, event: str) -> list[dict[str, object]]:
        whole = self.log_path.read_text().rpartition("\n")[0]  # the last line may be incomplete
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["event"] == event]


class Trainer:
    """A trainer's side of its slots, as in `ckpt_engine.trainer.trainer_engine`, without torch."""

    def __init__(
        self, host: EngineHost, rank: int, generation: int = 1, lineage: Lineage | None = None, *, seed: int = 0
    ) -> None:
        self.seed = seed  # of its shards
        self.host = host
        self.rank = rank
        self.generation = generation
        self.lineage = lineage or (LineageEntry(generation),)
        self.segments = RankSegments.open(rank_segment(host.prefix, JOB, rank), create=True)
        self.segments.control.attach_trainer(generation)

    def payload(self, step: int, count: int = 300_000) -> bytes:
        values = np.random.default_rng([step, self.rank, self.seed]).random(count, dtype=np.float32)
        return save({"weight": values, "step": np.array([step])}, {"step": str(step)})

    def try_save(self, step: int) -> bool:
        """False while no slot may be overwritten."""
        control = self.segments.control
        control.write_position(step)
        world = control.read_world()
        known = world.generation == self.generation
        slot = self.segments.choose(
            world.step if known else -1,
            self.lineage,
            world.abandoned if known else (),
            world.held if known else (),
            world.kept if known else NOTHING_KEPT,
        )
        if slot is None:
            return False
        data = self.payload(step)
        self.segments.begin_write(slot.index, self.generation, step, len(data))[:] = data
        self.segments.mark_captured(slot.index)
        self.notify(Captured(JOB, self.rank, self.generation, step, slot.index))
        return True

    def save(self, step: int) -> None:
        until(lambda: self.try_save(step))

    def notify(self, notice: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(wire.encode(notice), str(self.host.state_dir / "notify.sock"))
            except OSError:
                return  # without an engine; it scans when it is back

    def begin_torn(self, step: int) -> None:
        """The trainer dies in the middle of a capture."""
        world = self.segments.read_world()
        slot = choose_slot(self.segments.slots(), world.step, self.lineage, world.abandoned)
        assert slot is not None
        data = self.payload(step)
        self.segments.begin_write(slot.index, self.generation, step, len(data))[: len(data) // 2] = data[
            : len(data) // 2
        ]

    @property
    def world_step(self) -> int:
        return self.segments.read_world().step

    def knows_end_of(self, step: int) -> bool:
        """All ranks have it, or it was given up."""
        world = self.segments.read_world()
        return world.step >= step or step in world.abandoned

    def stored(self, generation: int, step: int) -> bytes | None:
        view = self.segments.find(generation, step, SlotState.COMMITTED)
        return bytes(self.segments.payload(view.index)) if view else None

    def await_restore(self, generation: int) -> RestoreState:
        def settled() -> bool:
            words = self.segments.control.read_restore()
            return words.generation == generation and words.state in (RestoreState.READY, RestoreState.FAILED)

        until(settled)
        return self.segments.control.read_restore().state
