"""A kernel of the user's own in C."""

from __future__ import annotations

import ctypes

from capture_corpus.loop import Loop, compiled_c, matrix, sgd

NEEDS = "cc"


def make() -> Loop:
    kernel = compiled_c("void scale(float *p, long n) { for (long i = 0; i < n; i++) p[i] *= 0.5f; }").scale
    kernel.argtypes = (ctypes.c_void_p, ctypes.c_long)
    p = matrix()
    return Loop({"p": p}, sgd([p]), lambda: kernel(p.data_ptr(), p.numel()))
