"""An in-place update that inductor compiles to C++."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix, sgd

NEEDS = "cc"


def make() -> Loop:
    p = matrix()
    update = torch.compile(lambda target: target.mul_(0.5).add_(0.1))

    def write() -> None:
        with torch.no_grad():
            update(p)

    write()
    return Loop({"p": p}, sgd([p]), write)
