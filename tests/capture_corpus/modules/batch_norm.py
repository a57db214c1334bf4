"""BatchNorm's statistics, which the forward pass writes."""

from __future__ import annotations

import torch
from capture_corpus.loop import ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.Sequential(torch.nn.Linear(64, ROWS), torch.nn.BatchNorm1d(ROWS))
    x = torch.randn(8, 64)
    return Loop({"model": model}, sgd(list(model.parameters())), lambda: model(x))
