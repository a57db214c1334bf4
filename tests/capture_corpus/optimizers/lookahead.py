"""Lookahead: slow weights are written into the fast ones."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    p = matrix()
    slow = p.detach().clone()

    def write() -> None:
        slow.add_(p.data - slow, alpha=0.5)
        p.data.copy_(slow)

    return Loop({"p": p, "slow": slow}, sgd([p]), write)
