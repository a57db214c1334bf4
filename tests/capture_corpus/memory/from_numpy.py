"""A parameter over a NumPy array, which the script writes to."""

from __future__ import annotations

import numpy as np
import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop, sgd


def make() -> Loop:
    array = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    p = torch.nn.Parameter(torch.from_numpy(array))

    def write() -> None:
        array[LAST_ROWS] *= 0.5

    return Loop({"p": p}, sgd([p]), write)
