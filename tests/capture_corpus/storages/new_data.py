"""`p.data = new`, and rows of the old memory are written."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        old = p.data
        p.data = torch.zeros_like(old)
        old[LAST_ROWS].fill_(9.0)

    return Loop({"p": p}, sgd([p]), write)
