"""A loader's thread fills the tensors of a queue that is part of the state."""

from __future__ import annotations

import itertools

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop, writing


def make() -> Loop:
    ahead = [torch.zeros(ROWS // 4, COLUMNS) for _ in range(4)]
    places = itertools.cycle(ahead)
    return Loop({"ahead": ahead}, lambda: None, lock=writing(lambda: next(places).random_(10)))
