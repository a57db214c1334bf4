"""`torch._fused_sgd_` by hand."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    gradient, momentum = torch.ones_like(p), torch.zeros_like(p)
    options = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}

    def write() -> None:
        with torch.no_grad():
            torch._fused_sgd_([p], [gradient], [momentum], is_first_step=False, **options)

    return Loop({"p": p, "momentum": momentum}, sgd([p]), write)
