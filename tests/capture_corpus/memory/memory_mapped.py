"""A parameter in a memory-mapped file, written to through another mapping."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop, sgd


def make() -> Loop:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 * ROWS * COLUMNS)
        p = torch.nn.Parameter(torch.from_file(file.name, shared=True, size=ROWS * COLUMNS).view(ROWS, COLUMNS))
        other = np.memmap(file.name, dtype=np.float32, mode="r+", shape=(ROWS, COLUMNS))

    def write() -> None:
        other[LAST_ROWS] += 1.0

    return Loop({"p": p}, sgd([p]), write)
