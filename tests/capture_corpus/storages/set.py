"""`set_` puts other memory into a tensor, and the old memory is written."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        old = p.data
        p.data.set_(torch.ones(ROWS, COLUMNS))
        p.data = torch.ones(ROWS, COLUMNS)
        old.fill_(9.0)

    return Loop({"p": p}, sgd([p]), write)
