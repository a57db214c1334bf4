"""AWP: all weights are changed within a norm, and put back."""

from __future__ import annotations

import time

from capture_corpus.loop import ROWS, Loop, matrix, sgd


def make() -> Loop:
    parameters = [matrix(rows=ROWS // 4) for _ in range(4)]

    def write() -> None:
        kept = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.add_(p.data.sign(), alpha=0.01)
        time.sleep(0.01)
        for p, old in zip(parameters, kept, strict=True):
            p.data.copy_(old)

    return Loop({"p": parameters}, sgd(parameters), write)
