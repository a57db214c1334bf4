"""Magnitude pruning at each fifth step."""

from __future__ import annotations

import itertools

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    saves = itertools.count()

    def write() -> None:
        if next(saves) % 5 == 0:
            mask = torch.ones_like(p)
            mask[ROWS // 2 : -8] = (torch.rand(ROWS - ROWS // 2 - 8, COLUMNS) > 0.3).float()
            p.data.mul_(mask)

    return Loop({"p": p}, sgd([p]), write)
