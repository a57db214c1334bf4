"""Who writes what several ranks hold alike: each entry once, spread over its holders by bytes, largest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

BALANCED: Final = 1.05  # the largest load over the mean one
_LEAST_BYTES = 1 << 20  # of a piece: checksums are of as many bytes
_PARTS_OF_A_SHARE = 16  # Llama 7B on up to 512 ranks is balanced with these, and not with 12


def assign(sizes: Sequence[int], holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """For each entry of `sizes` bytes, which of its `holders` (ranks, at least one) writes it.

    What a single rank holds counts as that rank's load first. Then each entry, the largest first, goes to the holder
    with the least to write, of equal ones to the first. The same input gives the same answer on every rank.
    """
    loads = [0] * ranks
    writers = [held[0] for held in holders]
    shared = []
    for entry, held in enumerate(holders):
        if len(held) == 1:
            loads[held[0]] += sizes[entry]
        else:
            shared.append(entry)
    for entry in sorted(shared, key=lambda number: -sizes[number]):
        writers[entry] = min(holders[entry], key=lambda rank: (loads[rank], rank))
        loads[writers[entry]] += sizes[entry]
    return writers


def cuts(sizes: Sequence[int], holders: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Into how many equal pieces to cut each entry before `assign`: 1 for all if that is balanced anyway, else as many
    as make no piece of what several ranks hold larger than a sixteenth of a rank's fair share, or than 1 MiB."""
    writers = assign(sizes, holders, ranks)
    loads = [0] * ranks
    for size, writer in zip(sizes, writers, strict=True):
        loads[writer] += size
    if spread(loads) <= BALANCED:
        return [1] * len(sizes)
    largest = max(sum(sizes) // ranks // _PARTS_OF_A_SHARE, _LEAST_BYTES)
    return [-(-size // largest) if len(held) > 1 and size else 1 for size, held in zip(sizes, holders, strict=True)]


def spread(loads: Sequence[int]) -> float:
    """The largest load over the mean one; 1.0 if nobody has anything."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
