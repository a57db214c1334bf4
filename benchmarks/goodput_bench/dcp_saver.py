"""torchrun's side: checkpoints as in torch's documentation, and the rank's events.

`dcp.async_save` runs every K steps; a restart loads the newest complete checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
import time
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from train_gpt import StandardLibrary

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import encode
from goodput_bench.saves import Save, write_save

KEEP = 2  # complete checkpoints; Flyball's disk tier keeps as many
_METADATA = ".metadata"  # torch renames it into place when all ranks have written
_SAVE_TIMEOUT_S = 120.0  # of the saves' own group; only the training group's timeout detects hangs


class RankEvents:
    """Events of a rank under torchrun in Flyball's schema, appended to the rank's own file.

    Each event is written to the kernel at once, so a killed rank loses none."""

    def __init__(self, path: Path, *, job: str, generation: int, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._clock = SystemClock()
        self._job, self._generation, self._rank = job, generation, rank
        self._marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Record this moment as `attached_at`, `restore_began_at`, `restored_at` or `first_step_at`."""
        self._marks[name] = self._clock.wall_s()
        self._write(EventKind.RANK_MARKS, dict(self._marks))

    def blocked(self, total_s: float) -> None:
        """Record how long the step loop has waited in saves so far."""
        self._marks["save_blocked_s"] = total_s
        self._write(EventKind.RANK_MARKS, dict(self._marks))

    def restored(self, step: int, seconds: float) -> None:
        self._write(EventKind.RESTORED, {"step": step, "source_tier": "disk", "seconds": seconds})

    def save_failed(self, step: int, error: BaseException) -> None:
        """Record it as Flyball's event log does. The reason goes to the launcher's output."""
        print(f"rank {self._rank}: the save of step {step} failed: {error}", file=sys.stderr, flush=True)
        self._write(EventKind.SIGNAL, {"kind": "save_failed", "source": f"rank {self._rank}"})

    def step(self, step: int) -> None:
        """Optimizer step `step` is complete."""
        self._write(EventKind.STEPS, {"first_step": step, "completed_at": [self._clock.wall_s()]})

    def _write(
        self, kind: EventKind, data: dict[str, str | int | float | bool | list[int | float | str] | None]
    ) -> None:
        event = Event(
            at=self._clock.wall_s(), kind=kind, job=self._job, generation=self._generation, rank=self._rank, data=data
        )
        os.write(self._file, encode(event) + b"\n")


class DcpSaver:
    """One rank's saves and restores under torchrun, recorded as events."""

    def __init__(self, folder: Path, *, job: str, every_steps: int) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._events = RankEvents(
            folder / "events" / f"rank{self.rank}.jsonl", job=job, generation=self.generation, rank=self.rank
        )
        self._events.mark("attached_at")
        self._folder = folder / "checkpoints"
        self._saves = folder / "saves.txt"
        self._every_steps = every_steps
        self._blocked_s = 0.0
        self._in_flight: Future[Any] | None = None
        self._in_flight_step = -1

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: StandardLibrary) -> int:
        """Load the newest complete checkpoint and return the step to continue with."""
        self._events.mark("restore_began_at")
        began_s = time.monotonic()
        # DistributedDataParallel owns the default group; two threads must not issue collectives on one group.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SAVE_TIMEOUT_S))
        self._model, self._optimizer, self._data = model, optimizer, data
        newest = torch.tensor(_newest_complete(self._folder) if self.rank == 0 else -1)
        dist.broadcast(newest, 0)
        step = int(newest)
        if step >= 0:
            state = self._state()
            load(state, checkpoint_id=self._path(step), process_group=self._group)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            data.load_state_dict({"generator": state["data"][f"rank{self.rank}"]})
            self._events.restored(step, time.monotonic() - began_s)
        self._events.mark("restored_at")
        return step + 1

    def step(self, step: int) -> None:
        self._events.step(step)

    def save(self, step: int) -> None:
        """Start a save if one is due, after waiting for the previous one. Training continues if a save fails."""
        if (step + 1) % self._every_steps:
            return
        began_at, began_s = SystemClock().wall_s(), time.monotonic()
        self.wait()
        saving = async_save(self._state(), checkpoint_id=self._path(step), process_group=self._group)
        assert isinstance(saving, Future)  # torch's default stager is synchronous
        self._blocked_s += time.monotonic() - began_s
        self._events.blocked(self._blocked_s)
        if self.rank == 0:
            saving.add_done_callback(partial(self._saved, step, began_at))
        self._in_flight, self._in_flight_step = saving, step

    def wait(self) -> None:
        """Wait for the save in flight, if any, and report its failure."""
        if self._in_flight is not None and (error := self._in_flight.exception()) is not None:
            self._events.save_failed(self._in_flight_step, error)
        self._in_flight = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "data": {f"rank{self.rank}": self._data.state_dict()["generator"]},
        }

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _saved(self, step: int, began_at: float, done: Future[Any]) -> None:
        """Record a finished save and remove older checkpoints. Runs in the save's background thread."""
        if done.exception() is not None:
            shutil.rmtree(self._path(step), ignore_errors=True)  # leftovers would keep a full disk full
            return  # the next save reports it
        write_save(self._saves, Save(step=step, began_at=began_at, finished_at=SystemClock().wall_s()))
        for path in _complete(self._folder)[:-KEEP]:
            shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    return sorted(metadata.parent for metadata in folder.glob(f"step-*/{_METADATA}"))


def _newest_complete(folder: Path) -> int:
    found = _complete(folder)
    return int(found[-1].name.removeprefix("step-")) if found else -1
