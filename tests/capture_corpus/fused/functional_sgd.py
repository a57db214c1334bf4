"""`torch.optim.sgd.sgd`, the function, past every hook."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, sgd
from torch.optim.sgd import sgd as torch_sgd


def make() -> Loop:
    p = matrix()
    gradient = torch.ones_like(p)
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}

    def write() -> None:
        with torch.no_grad():
            torch_sgd([p], [gradient], [None], foreach=True, **options)

    return Loop({"p": p}, sgd([p]), write)
