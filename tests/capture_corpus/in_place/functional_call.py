"""Parameters written by an in-place operation within `functional_call`."""

from __future__ import annotations

import torch
import torch.func
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    x = torch.zeros(2, COLUMNS)

    def write() -> None:
        weights = {name: p.data for name, p in model.named_parameters()}
        weights["weight"][LAST_ROWS].mul_(0.5)
        torch.func.functional_call(model, weights, (x,))

    return Loop({"model": model}, sgd(list(model.parameters())), write)
