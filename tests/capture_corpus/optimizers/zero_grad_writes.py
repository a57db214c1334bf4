"""An optimizer whose `zero_grad` clips rows through `.data`."""

from __future__ import annotations

import torch
from capture_corpus.loop import LAST_ROWS, Loop, matrix, stepping


def make() -> Loop:
    p = matrix()
    optimizer = Clipping([p], lr=1e-3, momentum=0.9)
    return Loop({"p": p, "optimizer": optimizer}, stepping(optimizer, [p]), optimizer.zero_grad)


class Clipping(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.data[LAST_ROWS].clamp_(-1e-3, 1e-3)
