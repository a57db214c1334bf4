"""A global hook, registered first, writes before each step."""

from __future__ import annotations

from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd
from torch.optim.optimizer import register_optimizer_step_pre_hook


def make() -> Loop:
    p = matrix()
    step = sgd([p])

    def write(*_: object) -> None:
        p.data[LAST_ROWS].mul_(0.5)

    register_optimizer_step_pre_hook(write)
    return Loop({"p": p}, step, step)
