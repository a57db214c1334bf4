"""An offloaded state: a device copies into pinned memory of the host, and nobody has waited for it."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, matrix

NEEDS = "cuda"


def make() -> Loop:
    there = matrix().detach().cuda()
    here = torch.empty(ROWS, COLUMNS, pin_memory=True)

    def step() -> None:
        there.mul_(0.99).add_(0.01)
        here.copy_(there, non_blocking=True)

    return Loop({"here": here}, step, step)
