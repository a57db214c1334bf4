"""torch's fused AdamW, which steps right after the save."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
    step = stepping(optimizer, [p])
    return Loop({"p": p, "optimizer": optimizer}, step, step)
