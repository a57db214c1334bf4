"""Another thread writes the tail through `.data`."""

from __future__ import annotations

from capture_corpus.loop import LAST_ROWS, Loop, matrix, sgd, writing


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lock=writing(lambda: p.data[LAST_ROWS].add_(1.0)))
