"""A Triton kernel of the user's own."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix

try:
    import triton
    import triton.language as tl
except ImportError:
    pass
else:

    @triton.jit
    def scale(p, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p + at, tl.load(p + at, mask=at < count) * 0.5, mask=at < count)


NEEDS = "triton"


def make() -> Loop:
    p = torch.nn.Parameter(matrix().detach().cuda())

    def write() -> None:
        scale[(triton.cdiv(p.numel(), 1024),)](p, p.numel(), BLOCK=1024)

    return Loop({"p": p}, lambda: p.data.add_(0.01), write)
