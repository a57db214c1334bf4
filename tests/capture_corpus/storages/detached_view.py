"""The state holds a detached view, and the script writes through it."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    flat = torch.nn.Parameter(torch.randn(ROWS * COLUMNS) * 0.01)
    view = flat.detach()
    return Loop({"view": view}, sgd([flat]), lambda: view[-(1 << 18) :].add_(1.0))
