"""Sparse SGD by hand, from the fifth save on."""

from __future__ import annotations

import itertools

import torch
from capture_corpus.loop import ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    saves = itertools.count()

    def write() -> None:
        if next(saves) >= 5:
            rows = torch.randperm(ROWS)[:100]
            p.data[rows] -= 0.1

    return Loop({"p": p}, sgd([p]), write)
