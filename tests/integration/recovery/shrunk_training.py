"""A training whose numbers do not depend on how many ranks there are: each step is done elementwise on a sharded
tensor, and the loss is that of the gathered one. So every step has one right loss in worlds of any size, to the last
bit. Beside it, each rank writes what it restored."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flyball

SIZE = (24, 500)


def first() -> torch.Tensor:
    return torch.arange(SIZE[0] * SIZE[1], dtype=torch.float64).reshape(SIZE).mul_(1e-3)


def advance(weights: torch.Tensor, step: int) -> None:
    weights.mul_(0.999).add_(0.01 * (step % 7))


def loss_of(weights: torch.Tensor) -> float:
    return float(weights.square().mean())


def main(folder: Path, pace_s: float) -> None:
    job = flyball.attach()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state = {"weights": distribute_tensor(first(), mesh, [Shard(0)], src_data_rank=None)}
    weights = state["weights"]
    assert isinstance(weights, DTensor)
    begin = job.restore(state)
    with (folder / f"rank{rank}.txt").open("a") as lines:
        if begin:
            lines.write(f"restored {world} {begin - 1} {loss_of(weights.full_tensor())!r}\n")
            lines.flush()
        for step in range(begin, 1_000_000):
            threading.Event().wait(pace_s)
            advance(weights.to_local(), step)
            loss = loss_of(weights.full_tensor())
            lines.write(f"step {world} {step} {loss!r}\n")
            lines.flush()
            job.step(step, loss=loss)
            job.save(step, state)


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"]
    main(Path(sys.argv[1]), float(sys.argv[2]))
