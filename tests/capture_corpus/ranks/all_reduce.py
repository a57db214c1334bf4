"""`dist.all_reduce` of a parameter, as in local SGD."""

from __future__ import annotations

import torch.distributed as dist
from capture_corpus.loop import Loop, matrix, sgd

RANKS = 2


def make() -> Loop:
    p = matrix()

    def write() -> None:
        dist.all_reduce(p.data)
        p.data.div_(2.0)

    return Loop({"p": p}, sgd([p]), write)
