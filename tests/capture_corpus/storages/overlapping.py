"""Two overlapping views in the state, of which one is written."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, LAST_ROWS, ROWS, Loop


def make() -> Loop:
    whole = torch.randn(ROWS, COLUMNS)
    return Loop({"all": whole, "rows": whole[8:]}, lambda: whole.add_(0.9), whole[LAST_ROWS].zero_)
