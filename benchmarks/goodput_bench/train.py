"""The job of the comparison: the GPT of examples/train_gpt.py, the same under both launchers.

Only saving and restoring differ: `--saver flyball` under `flyball run`, `--saver dcp` under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]

import torch  # noqa: E402 - the lines above make our modules importable
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from train_gpt import GPT, LossLog, StandardLibrary  # noqa: E402

from goodput_bench.faults import FaultSignals  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import MutableMapping

HEADS = 4
SAVERS: tuple[str, ...] = ("flyball", "dcp")


class Saver(Protocol):
    """Saves and restores one rank, and reports its progress."""

    rank: int
    world_size: int
    generation: int

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: StandardLibrary) -> int: ...
    def step(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...


class FlyballSaver:
    """As in examples/train_gpt.py: attach, restore, step, save after every step."""

    def __init__(self) -> None:
        import flyball

        self._job = flyball.attach()
        self.rank, self.world_size, self.generation = self._job.rank, self._job.world_size, self._job.generation
        self._state: MutableMapping[str, object] = {}

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: StandardLibrary) -> int:
        self._state = {"model": model, "optimizer": optimizer, "data": data}
        return self._job.restore(self._state)

    def step(self, step: int) -> None:
        self._job.step(step)

    def save(self, step: int) -> None:
        self._job.save(step, self._state)


def make_saver(options: argparse.Namespace) -> Saver:
    if options.saver == "flyball":
        return FlyballSaver()
    from goodput_bench.dcp_saver import DcpSaver

    return DcpSaver(options.folder, job=options.job, every_steps=options.save_every)


def train(options: argparse.Namespace) -> None:
    """Train until a signal ends the process."""
    saver = make_saver(options)
    fault_signals = FaultSignals()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.hang_timeout_s))
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, HEADS, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.batch_size, options.context, options.seed, saver.rank)
    losses = LossLog(str(options.folder / "losses"), saver.rank)
    network = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    start = saver.restore(model, optimizer, data)
    _write_pid(options.folder, saver.rank)
    for step in count(start):
        began_s = time.monotonic()
        fault_signals.check(step)
        tokens, targets = data.batch()
        loss = network(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(max(0.0, began_s + options.step_floor_s - time.monotonic()))
        saver.step(step)
        losses.write(step, loss.item(), saver.generation)
        saver.save(step)


def _write_pid(folder: Path, rank: int) -> None:
    """Let the injector find this rank. The file appears atomically."""
    temporary = folder / f".rank{rank}.pid"
    temporary.write_text(str(os.getpid()))
    temporary.rename(folder / f"rank{rank}.pid")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saver", choices=SAVERS, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="folder for losses, events and checkpoints")
    parser.add_argument("--job", required=True)
    parser.add_argument("--save-every", type=int, required=True, help="steps between two saves of --saver dcp")
    parser.add_argument("--hang-timeout-s", type=float, required=True, help="timeout of the training's process group")
    parser.add_argument("--step-floor-s", type=float, required=True, help="the least duration of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse(sys.argv[1:]))
