"""`dist.broadcast` into a parameter."""

from __future__ import annotations

import torch.distributed as dist
from capture_corpus.loop import Loop, matrix, sgd

RANKS = 2


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: dist.broadcast(p.data, 0))
