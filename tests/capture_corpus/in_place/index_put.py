"""Rows by index, as sparse updates by hand."""

from __future__ import annotations

import torch
from capture_corpus.loop import ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    rows = torch.randperm(ROWS)[:200]
    return Loop({"p": p}, sgd([p]), lambda: p.data.index_put_((rows,), torch.zeros(())))
