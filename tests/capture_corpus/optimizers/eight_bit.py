"""Quantized moments: int8 with a scale for each row, written by hand."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, matrix


def make() -> Loop:
    p = matrix()
    moment, scale = torch.zeros(ROWS, COLUMNS, dtype=torch.int8), torch.ones(ROWS)

    def step() -> None:
        value = moment.float() * scale[:, None] * 0.9 + torch.randn(ROWS, COLUMNS) * 0.1
        scale.copy_(value.abs().amax(1) / 127.0)
        moment.copy_(torch.round(value / scale[:, None]))
        p.data.sub_(value, alpha=0.01)

    return Loop({"p": p, "moment": moment, "scale": scale}, step, step)
