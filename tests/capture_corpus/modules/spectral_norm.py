"""Spectral norm: the forward pass writes the power iteration's buffers."""

from __future__ import annotations

import torch
import torch.nn.utils.parametrizations
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(COLUMNS, ROWS))
    x = torch.randn(2, COLUMNS)
    return Loop({"model": model}, sgd(list(model.parameters())), lambda: model(x))
