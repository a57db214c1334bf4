"""A compiled optimizer step."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix


def make() -> Loop:
    p = matrix()
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    step = torch.compile(optimizer.step, backend="aot_eager")
    return Loop({"p": p, "optimizer": optimizer}, step, step)
