"""The same, and the state is a dict of `.data`, as in old scripts."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, sgd


def make() -> Loop:
    table = torch.nn.Embedding(ROWS, COLUMNS, max_norm=5.0)
    rows = torch.arange(ROWS - 200, ROWS)
    step = sgd(list(table.parameters()))

    def grow() -> None:
        step()
        table.weight.data[rows] += 5.0

    return Loop({"table": {name: p.data for name, p in table.named_parameters()}}, grow, lambda: table(rows))
