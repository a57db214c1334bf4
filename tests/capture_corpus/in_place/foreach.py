"""`torch._foreach_add_` of a part."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        with torch.no_grad():
            torch._foreach_add_([p[LAST_ROWS]], 1.0)

    return Loop({"p": p}, sgd([p]), write)
