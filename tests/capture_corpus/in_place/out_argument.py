"""`out=` of a function."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: torch.mul(p.data, 0.5, out=p.data))
