"""A tensor in shared memory that another process writes to: Hogwild."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.multiprocessing
from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    p.share_memory_()
    context = torch.multiprocessing.get_context("fork")
    lock = context.Lock()
    context.Process(target=_write, args=(p.detach().numpy(), lock), daemon=True).start()
    return Loop({"p": p}, sgd([p]), lock=lock)


def _write(view: np.ndarray, lock: AbstractContextManager[object]) -> None:
    while True:
        with lock:
            view[LAST_ROWS] += 1.0
        time.sleep(0.001)
