"""Parameters are views of one flat buffer; the optimizer has the flat one, the state the views."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    flat = torch.nn.Parameter(torch.randn(ROWS * COLUMNS) * 0.01)
    step = sgd([flat])
    return Loop({"views": [view.view(-1, COLUMNS) for view in flat.detach().chunk(4)]}, step, step)
