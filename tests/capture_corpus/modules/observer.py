"""An observer for quantization, which the forward pass writes."""

from __future__ import annotations

import torch
import torch.ao.quantization
from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    model = torch.ao.quantization.MovingAverageMinMaxObserver(averaging_constant=0.5)
    p = matrix()
    model(p)
    return Loop({"observer": model, "p": p}, sgd([p]), lambda: model(torch.randn(64) * 3.0))
