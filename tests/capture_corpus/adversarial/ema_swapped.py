"""Averages are swapped in for an evaluation now and then."""

from __future__ import annotations

import itertools
import time

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    average, saves = p.detach().clone() + 0.5, itertools.count()

    def write() -> None:
        average.lerp_(p.data, 0.1)
        if next(saves) % 4 == 0:
            kept = p.data.clone()
            p.data.copy_(average)
            time.sleep(0.003)
            p.data.copy_(kept)

    return Loop({"p": p, "average": average}, sgd([p]), write)
