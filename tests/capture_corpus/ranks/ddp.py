"""DDP, which writes buffers before each forward pass."""

from __future__ import annotations

import torch
import torch.nn.parallel
from capture_corpus.loop import COLUMNS, ROWS, Loop

RANKS = 2


def make() -> Loop:
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS), torch.nn.BatchNorm1d(ROWS))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        parallel(torch.randn(4, COLUMNS)).square().mean().backward()
        optimizer.step()

    return Loop({"model": model, "optimizer": optimizer}, step, step)
