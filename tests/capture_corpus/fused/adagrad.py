"""`torch._fused_adagrad_` by hand."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    gradient, sums, number = torch.ones_like(p), torch.zeros_like(p), torch.tensor(1.0)
    options = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}

    def write() -> None:
        with torch.no_grad():
            torch._fused_adagrad_([p], [gradient], [sums], [number], **options)

    return Loop({"p": p, "sums": sums}, sgd([p]), write)
