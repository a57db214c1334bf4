"""GradScaler and autocast."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop


def make() -> Loop:
    model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)
    x = torch.randn(2, COLUMNS)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Loop({"model": model, "optimizer": optimizer, "scaler": scaler}, step, step)
