"""An optimizer for each parameter, which steps inside the backward pass."""

from __future__ import annotations

import torch
from capture_corpus.loop import ROWS, Loop, matrix


def make() -> Loop:
    parameters = [matrix(rows=ROWS // 8) for _ in range(8)]
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in parameters}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in parameters:
        p.register_post_accumulate_grad_hook(update)

    def step() -> None:
        sum(p.square().sum() for p in parameters).backward()

    return Loop({"p": parameters, "optimizers": list(optimizers.values())}, step, step)
