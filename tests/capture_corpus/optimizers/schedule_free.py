"""Schedule-free: evaluation and training swap the weights."""

from __future__ import annotations

import time

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p, average = matrix(), matrix()

    def write() -> None:
        p.data.lerp_(average.data, 0.5)
        time.sleep(0.005)  # an evaluation
        p.data.lerp_(average.data, -1.0)

    return Loop({"p": p, "average": average}, sgd([p]), write)
