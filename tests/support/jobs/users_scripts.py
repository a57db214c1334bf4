"""The user's training scripts: a small one, and the README's snippet made complete."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[3] / "README.md"

# Its own flags have names that launchers have too; rank 0 prints each step, the steps per generation are in steps.txt.
TRAIN = """
import argparse, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

import flyball

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--ckpt", default="")
parser.add_argument("--save", action="store_true")
parser.add_argument("--network", default="")
parser.add_argument("--host", default="")
options = parser.parse_args()

dist.init_process_group("gloo")
job = flyball.attach()
model = torch.nn.Linear(64, 64)
network = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
start = job.restore({"model": model, "optimizer": optimizer})
steps = Path(os.environ.get("STEPS_FILE", "steps.txt")).open("a", buffering=1) if job.rank == 0 else None
if steps:
    steps.write(f"start {start} {job.generation} {os.getpid()}\\n")
    print("options", options.ckpt, options.save, options.network, options.host, flush=True)
for step in range(start, options.steps):
    loss = network(torch.randn(8, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if steps:
        steps.write(f"step {step} {job.generation} {os.getpid()}\\n")
    job.step(step, loss=loss.detach())
    job.save(step, {"model": model, "optimizer": optimizer})
    time.sleep(options.step_s)
job.close()
dist.barrier()
dist.destroy_process_group()
"""

BEFORE_THE_SNIPPET = """
import time

import torch
from torch import nn

model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
total = 610


def evaluate(model):
    time.sleep(8.0)
    print("evaluated", flush=True)
"""
THE_STEP = """
    loss = model(torch.randn(32, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def readme_script() -> str:
    """The README's snippet with a training step for its `...`, its names defined, and a message at the end."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    [snippet] = [block for block in blocks if "flyball.attach()" in block]
    assert snippet.count("\n    ...\n") == 1, "the README's snippet has one line in place of the step"
    assert "evaluate(model)" in snippet
    return BEFORE_THE_SNIPPET + snippet.replace("\n    ...\n", THE_STEP) + "print('trained', total)\njob.close()\n"


class Steps:
    """The contents of TRAIN's steps.txt, by generation in the order of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[tuple[str, int, int, int]]:
        if not self.path.exists():
            return []
        found = [line.split() for line in self.path.read_text().splitlines()]
        return [(word, int(step), int(generation), int(pid)) for word, step, generation, pid in found]

    def newest(self) -> int:
        """The newest completed step; -1 if none."""
        return max((step for word, step, _, _ in self.lines() if word == "step"), default=-1)

    def starts(self) -> list[int]:
        """The first step of each start of the script."""
        return [step for word, step, _, _ in self.lines() if word == "start"]

    def missing(self) -> set[int]:
        """Steps up to the newest that no start completed."""
        return set(range(self.newest() + 1)) - {step for word, step, _, _ in self.lines() if word == "step"}

    def pid(self) -> int:
        """The process id of the last writer."""
        return self.lines()[-1][3]
