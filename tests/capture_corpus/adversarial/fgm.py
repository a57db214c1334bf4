"""FGM: rows of an embedding are changed through `.data` and put back before the step."""

from __future__ import annotations

import time

import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop, sgd


def make() -> Loop:
    table = torch.nn.Embedding(ROWS, COLUMNS)

    def write() -> None:
        rows = table.weight.data[LAST_ROWS]
        kept = rows.clone()
        rows += 1.0
        time.sleep(0.01)  # forward and backward of the adversarial loss
        rows.copy_(kept)

    return Loop({"table": table}, sgd(list(table.parameters())), write)
