"""The learning rate is a tensor, which a scheduler writes to."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = torch.optim.AdamW([p], lr=torch.tensor(1e-3), foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    state = {"p": p, "optimizer": optimizer, "scheduler": scheduler}
    return Loop(state, stepping(optimizer, [p]), scheduler.step)
