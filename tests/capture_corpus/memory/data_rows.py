"""`p.data[rows].add_`: no counter is raised, and most bytes stay."""

from __future__ import annotations

from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: p.data[LAST_ROWS].add_(1.0))
