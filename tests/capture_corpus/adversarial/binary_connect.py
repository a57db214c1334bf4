"""BinaryConnect: the forward pass sees signs, the step the full weights."""

from __future__ import annotations

import time

from capture_corpus.loop import ROWS, Loop, matrix, sgd


def make() -> Loop:
    parameters = [matrix(rows=ROWS // 16) for _ in range(16)]

    def write() -> None:
        full = [p.data.clone() for p in parameters]
        for p in parameters:
            p.data.sign_()
        time.sleep(0.005)
        for p, old in zip(parameters, full, strict=True):
            p.data.copy_(old)

    return Loop({"p": parameters}, sgd(parameters), write)
