"""A CUDA graph is replayed."""

from __future__ import annotations

import torch
from capture_corpus.loop import Loop, matrix

NEEDS = "cuda"


def make() -> Loop:
    p = torch.nn.Parameter(matrix().detach().cuda())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        p.mul_(0.99).add_(0.01)
    return Loop({"p": p}, graph.replay, graph.replay)
