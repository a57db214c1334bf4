"""A warm restart zeroes the momentum."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9)

    def write() -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].data[LAST_ROWS].zero_()

    return Loop({"p": p, "optimizer": optimizer}, stepping(optimizer, [p]), write)
