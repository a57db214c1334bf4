"""A parametrization whose assignment writes the original."""

from __future__ import annotations

import torch
import torch.nn.utils.parametrizations
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(COLUMNS, ROWS, bias=False))

    def write() -> None:
        with torch.no_grad():
            model.weight = model.weight * 0.5

    return Loop({"model": model}, sgd(list(model.parameters())), write)
