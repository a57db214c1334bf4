"""`torch._fused_adamw_` of rows, by hand."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    shape = (64, COLUMNS)
    m, v, gradient, number = torch.zeros(shape), torch.zeros(shape), torch.ones(shape), torch.tensor(1.0)
    decay = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    options = {"lr": 0.1, **decay, "eps": 1e-8, "amsgrad": False, "maximize": False}

    def write() -> None:
        with torch.no_grad():
            torch._fused_adamw_([p[LAST_ROWS]], [gradient], [m], [v], [], [number], **options)

    return Loop({"p": p}, sgd([p]), write)
