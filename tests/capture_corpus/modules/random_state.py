"""Generators' states and numbers beside a tensor: all of one moment."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix


def make() -> Loop:
    p = matrix()
    generator = torch.Generator()
    state = {"p": p, "generator": generator.get_state(), "count": torch.zeros(1 << 16)}

    def step() -> None:
        p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
        state["generator"] = generator.get_state()
        state["count"] += 1.0

    return Loop(state, step, step)
