"""A hook before each forward pass writes to the weights."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)

    def write(module: torch.nn.Linear, _: object) -> None:
        module.weight.data[LAST_ROWS].mul_(0.9)

    model.register_forward_pre_hook(write)
    x = torch.randn(2, COLUMNS)
    return Loop({"model": model}, sgd(list(model.parameters())), lambda: model(x))
