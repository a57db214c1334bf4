"""A NumPy view of a parameter."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    view = p.detach().numpy()
    return Loop({"p": p}, sgd([p]), lambda: view.__iadd__(1.0))
