"""`swap_tensors`, then the old memory is written."""

from __future__ import annotations

import torch
import torch.utils
from capture_corpus.loop import Loop, matrix


def make() -> Loop:
    p = matrix()

    def write() -> None:
        other = torch.nn.Parameter(torch.zeros_like(p))
        torch.utils.swap_tensors(p, other)
        other.data.fill_(3.0)

    return Loop({"p": p}, lambda: None, write)
