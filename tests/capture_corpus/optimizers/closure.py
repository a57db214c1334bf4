"""LBFGS, which steps several times within one call."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix


def make() -> Loop:
    p = matrix(rows=64)
    optimizer = torch.optim.LBFGS([p], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().mean()
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step(closure)

    return Loop({"p": p, "optimizer": optimizer}, step, step)
