"""FSDP2: the forward pass unshards and frees."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2


def make() -> Loop:
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS // 2), torch.nn.Linear(ROWS // 2, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, COLUMNS)).square().mean().backward()
        optimizer.step()

    step()
    return Loop({"model": model, "optimizer": optimizer}, step, step)
