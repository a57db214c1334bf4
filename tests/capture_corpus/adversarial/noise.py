"""Noise is added for the forward pass and subtracted before the step."""

from __future__ import annotations

import time

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        noise = torch.randn_like(p[LAST_ROWS]) * 0.1
        kept = p.data[LAST_ROWS].clone()
        p.data[LAST_ROWS] += noise
        time.sleep(0.005)
        p.data[LAST_ROWS] = kept

    return Loop({"p": p}, sgd([p]), write)
