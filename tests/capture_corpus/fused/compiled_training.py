"""A whole training step, compiled."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop


def make() -> Loop:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(2, COLUMNS)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = torch.compile(train, backend="aot_eager")
    return Loop({"model": model, "optimizer": optimizer}, step, step)
