"""A collective that goes on while the script does something else: waited for before the save."""

from __future__ import annotations

import torch.distributed as dist
from capture_corpus.loop import Loop, matrix

RANKS = 2


def make() -> Loop:
    p = matrix()
    pending: list[dist.Work] = []

    def step() -> None:
        while pending:
            pending.pop().wait()
        p.data.div_(2.0)

    def write() -> None:
        pending.append(dist.all_reduce(p.data, async_op=True))

    return Loop({"p": p}, step, write)
