"""The untyped storage is filled."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: p.untyped_storage().fill_(7))
