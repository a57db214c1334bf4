"""Tries many seeds, in as many processes as wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from flyball.contracts.errors import FlyballError
from simulator.parallel import NoResult, Work, results
from simulator.swarm.tries import SeedResult, try_seed

_Piece = tuple[int, tuple[int, ...] | None]


def try_seeds(seeds: Sequence[int], *, jobs: int, kept: Sequence[int] | None = None) -> Iterator[SeedResult]:
    """The results of these seeds, as they come. Whoever stops reading ends the processes."""
    if jobs == 1 or len(seeds) == 1:
        yield from (try_seed(seed, kept) for seed in seeds)
        return
    pieces = [(seed, None if kept is None else tuple(kept)) for seed in seeds]
    found = results(Work(_try_piece, _Piece, SeedResult), pieces, jobs)
    with closing(found):
        for number, result in found:
            if isinstance(result, NoResult):
                faults = "" if kept is None else f" --faults {','.join(map(str, kept)) or 'none'}"
                raise FlyballError(
                    f"Seed {seeds[number]} could not be tried: {result.why}.",
                    hint=f"try it alone: flyball simulate swarm --seeds 1 --from-seed {seeds[number]}{faults}",
                )
            yield result


def _try_piece(piece: _Piece) -> SeedResult:
    return try_seed(*piece)
