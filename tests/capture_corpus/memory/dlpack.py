"""A second tensor over the same memory, by DLPack."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    other = torch.from_dlpack(p.detach())
    return Loop({"p": p}, sgd([p]), lambda: other[LAST_ROWS].add_(1.0))
