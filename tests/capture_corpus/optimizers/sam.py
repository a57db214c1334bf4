"""Sharpness-aware: the first step goes uphill, the second puts it back."""

from __future__ import annotations

import time

import torch
from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    step = sgd([p])

    def write() -> None:
        uphill = torch.randn_like(p) * 0.01
        p.data.add_(uphill)
        time.sleep(0.01)  # forward and backward
        p.data.sub_(uphill)

    return Loop({"p": p}, step, write)
