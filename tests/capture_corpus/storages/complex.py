"""Complex, conjugated and negated tensors."""

from __future__ import annotations

import torch
from capture_corpus.loop import COLUMNS, ROWS, Loop


def make() -> Loop:
    c = torch.randn(ROWS, COLUMNS // 2, dtype=torch.complex64)
    return Loop({"c": c, "conj": c.conj(), "neg": c.conj().imag}, lambda: c.mul_(0.9), lambda: c.add_(1.0))
