"""Rows of a NumPy view of a parameter."""

from __future__ import annotations

from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    view = p.detach().numpy()

    def write() -> None:
        view[LAST_ROWS] += 1.0

    return Loop({"p": p}, sgd([p]), write)
