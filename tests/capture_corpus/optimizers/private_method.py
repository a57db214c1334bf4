"""An optimizer of the user's with a private method that writes."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = Swapping([p], lr=1e-3, momentum=0.9)
    return Loop({"p": p, "optimizer": optimizer}, stepping(optimizer, [p]), optimizer._swap)


class Swapping(torch.optim.SGD):
    def _swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data[LAST_ROWS] *= -1.0
