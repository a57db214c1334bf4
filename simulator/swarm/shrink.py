"""Finds the fewest faults with which a trial still fails. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fewest(places: Sequence[int], fails: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """A part of `places` that fails, and of which no smaller part that was tried does: first halves are left out, then
    quarters, at last one at a time, until none of them can be (delta debugging).

    `fails` is asked once for each part. `places` itself is known to fail.
    """
    found = tuple(places)
    tried: dict[tuple[int, ...], bool] = {}

    def still(part: tuple[int, ...]) -> bool:
        if part not in tried:
            tried[part] = fails(part)
        return tried[part]

    size = max(1, len(found) // 2)
    while True:
        parts = (found[:at] + found[at + size :] for at in range(0, len(found), size))
        smaller = next((part for part in parts if still(part)), None)
        if smaller is not None:
            found = smaller
            size = max(1, min(size, len(found) // 2))
        elif size > 1:
            size //= 2
        else:
            return found
