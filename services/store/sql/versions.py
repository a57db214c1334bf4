"""Marks of rows that are written over: who keeps what a row said knows by its mark whether it says so still.

They are random, and not counted: who writes needs no look at the row, and one that was deleted and written anew does
not come back with a mark that it had before.
"""

from __future__ import annotations

import random
import secrets

_marks = random.Random(secrets.randbits(256))  # no system call for each: one gives the interpreter's lock away


def new_version() -> int:
    """A mark that no row had before; it fits a signed BIGINT."""
    return _marks.getrandbits(63)
