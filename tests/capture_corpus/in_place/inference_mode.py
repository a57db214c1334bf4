"""Rows in place under `inference_mode`."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        with torch.inference_mode():
            p[LAST_ROWS].add_(1.0)

    return Loop({"p": p}, sgd([p]), write)
