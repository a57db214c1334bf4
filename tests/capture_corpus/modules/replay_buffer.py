"""A replay buffer in the state, of which each step writes some rows."""

from __future__ import annotations

import itertools

import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop


def make() -> Loop:
    buffer, at = torch.zeros(ROWS, COLUMNS), itertools.count()

    def write() -> None:
        buffer[next(at) % ROWS] = torch.randn(COLUMNS)
        buffer[LAST_ROWS] += 1.0

    return Loop({"buffer": buffer}, write, write)
