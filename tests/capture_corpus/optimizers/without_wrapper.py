"""`step` without its wrapper, as some wrappers do to skip hooks."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9)
    raw = type(optimizer).step
    while hasattr(raw, "__wrapped__"):
        raw = raw.__wrapped__

    def write() -> None:
        with torch.no_grad():
            raw(optimizer)

    return Loop({"p": p, "optimizer": optimizer}, stepping(optimizer, [p]), write)
