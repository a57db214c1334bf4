"""The storage is freed and made again."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()

    def write() -> None:
        p.untyped_storage().resize_(0)
        p.untyped_storage().resize_(4 * p.numel())
        p.data.fill_(0.5)

    return Loop({"p": p}, sgd([p]), write)
