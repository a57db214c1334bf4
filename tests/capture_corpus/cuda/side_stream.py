"""Another stream, that waits for nobody, writes."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix

NEEDS = "cuda"


def make() -> Loop:
    p = torch.nn.Parameter(matrix().detach().cuda())
    side = torch.cuda.Stream()

    def write() -> None:
        with torch.cuda.stream(side):
            p.data[LAST_ROWS].add_(1.0)

    def step() -> None:
        torch.cuda.current_stream().wait_stream(side)
        p.data.mul_(0.99)

    return Loop({"p": p}, step, write)
