"""WGAN clips channels_last convolutions at every step."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, stepping


def make() -> Loop:
    conv = torch.nn.Conv2d(256, ROWS * COLUMNS // 256 // 9, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(conv.parameters(), lr=1e-3)

    def write() -> None:
        for p in conv.parameters():
            p.data.clamp_(-0.001, 0.001).add_(1.0)

    return Loop({"conv": conv, "optimizer": optimizer}, stepping(optimizer, list(conv.parameters())), write)
