"""A healthy data-parallel job with the pauses that ordinary scripts make: `benchmarks/false_alarms.py` runs it.

It trains for $HEALTHY_S seconds. Every $PAUSE_EVERY_S seconds comes the next pause: all ranks evaluate; rank 0
evaluates while the others wait for it; rank 0 writes a file slowly; all wait for data; an evaluation that is named.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flyball

HEALTHY_S = float(os.environ["HEALTHY_S"])
PAUSE_EVERY_S = float(os.environ["PAUSE_EVERY_S"])
PAUSE_S = float(os.environ["PAUSE_S"])
WAYS = ("all_evaluate", "rank_0_evaluates", "slow_file", "no_data", "named")


def compute(seconds: float) -> None:
    until_s, weights = time.monotonic() + seconds, torch.randn(256, 256)
    while time.monotonic() < until_s:
        weights = torch.tanh(weights @ weights)


def write_slowly(seconds: float) -> None:
    """A file on a disk that takes a few KiB a second."""
    path = Path(f"slow.rank{dist.get_rank()}")
    with path.open("wb") as file:
        for _ in range(int(seconds)):
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(1.0)
    path.unlink()


def pause(job: flyball.Job, way: str, seconds: float) -> None:
    is_first = job.rank == 0
    match way:
        case "all_evaluate":
            compute(seconds)
        case "rank_0_evaluates":
            compute(seconds if is_first else 0.0)
        case "slow_file":
            write_slowly(seconds if is_first else 0.0)
        case "no_data":
            time.sleep(seconds)
        case "named":
            with job.phase("eval"):
                compute(seconds)
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    job = flyball.attach()
    net = nn.Linear(256, 256)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": net, "optimizer": optimizer}
    began_s = time.monotonic()
    pauses, due_s = itertools.cycle(WAYS), PAUSE_EVERY_S
    for step in itertools.count(job.restore(state)):
        loss = model(torch.randn(64, 256)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step, loss=loss.detach())
        job.save(step, state)
        passed = torch.tensor([time.monotonic() - began_s])
        dist.broadcast(passed, 0)  # all ranks pause, and end, at the same step
        if passed.item() >= HEALTHY_S:
            break
        if passed.item() >= due_s:
            due_s += PAUSE_EVERY_S
            pause(job, next(pauses), PAUSE_S)
    dist.barrier()
    job.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
