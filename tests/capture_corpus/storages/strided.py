"""Transposed and strided tensors, which torch copies by itself."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop


def make() -> Loop:
    wide = torch.randn(ROWS, 2 * COLUMNS)
    state = {"even": wide[:, ::2], "turned": wide.t(), "row": wide[0].expand(64, -1), "empty": wide[:0]}
    return Loop(state, lambda: wide.mul_(0.9), lambda: wide.add_(1.0))
