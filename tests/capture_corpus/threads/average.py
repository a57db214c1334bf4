"""A thread that averages all the time."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd, writing


def make() -> Loop:
    p = matrix()
    average = p.detach().clone()
    return Loop({"p": p, "average": average}, sgd([p]), lock=writing(lambda: average.lerp_(p.data, 0.1)))
