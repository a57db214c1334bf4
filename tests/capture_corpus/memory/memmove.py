"""`memmove` into a part, as a C library does."""

from __future__ import annotations

import ctypes

import torch
from capture_corpus.loop import COLUMNS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    ones = torch.ones(COLUMNS * 64)
    end = p.data_ptr() + p.nbytes
    return Loop({"p": p}, sgd([p]), lambda: ctypes.memmove(end - 2 * ones.nbytes, ones.data_ptr(), ones.nbytes))
