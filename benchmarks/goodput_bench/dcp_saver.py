"""Checkpoints as torch's own documentation has them: `dcp.async_save` every K steps, and after a restart the newest
checkpoint that is complete."""

from __future__ import annotations

import os
import shutil
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
from goodput_bench.rank_events import RankEvents
from goodput_bench.saves_file import Save, write_save

KEEP = 2  # complete checkpoints, as Flyball's disk tier keeps
_METADATA = ".metadata"  # torch renames it into place when all ranks have written
_SAVE_TIMEOUT_S = 120.0  # of the saves' own group: only the training group's timeout is there to notice hangs


class DcpSaver:
    """One rank's saves and restores under torchrun, and the events that tell of them."""

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
        """Load the newest complete checkpoint; returns the step to go on with."""
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
        """Start a save if one is due; it waits for the one before, should that not be done yet. Training goes on
        also without it."""
        if (step + 1) % self._every_steps:
            return
        began_at, began_s = SystemClock().wall_s(), time.monotonic()
        self.wait()
        saving = async_save(self._state(), checkpoint_id=self._path(step), process_group=self._group)
        assert isinstance(saving, Future)  # the stager that torch chooses by itself is synchronous
        self._blocked_s += time.monotonic() - began_s
        self._events.blocked(self._blocked_s)
        if self.rank == 0:
            saving.add_done_callback(partial(self._saved, step, began_at))
        self._in_flight, self._in_flight_step = saving, step

    def wait(self) -> None:
        """For the save that is not done yet, if there is one; tells if it failed."""
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
        """In the background thread of the save: what it took, and older checkpoints go."""
        if done.exception() is not None:
            shutil.rmtree(self._path(step), ignore_errors=True)  # what there is of it would keep a full disk full
            return  # the next save tells of it
        write_save(self._saves, Save(step=step, began_at=began_at, finished_at=SystemClock().wall_s()))
        for path in _complete(self._folder)[:-KEEP]:
            shutil.rmtree(path)


def _complete(folder: Path) -> list[Path]:
    return sorted(metadata.parent for metadata in folder.glob(f"step-*/{_METADATA}"))


def _newest_complete(folder: Path) -> int:
    found = _complete(folder)
    return int(found[-1].name.removeprefix("step-")) if found else -1
