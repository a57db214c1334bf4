"""Layers that are made anew in training: `torch.nn.init` on rows."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: torch.nn.init.normal_(p.data[LAST_ROWS]))
