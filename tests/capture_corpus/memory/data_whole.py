"""`p.data.add_` of a whole tensor."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: p.data.add_(1.0))
