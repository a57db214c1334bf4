"""Tries many seeds, in as many processes as wanted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice

from flyball.process_start import end_with_parent
from simulator.swarm.tries import SeedResult, try_seed

AHEAD = 4  # seeds per process that wait for their turn


def try_seeds(seeds: Sequence[int], *, jobs: int, kept: Sequence[int] | None = None) -> Iterator[SeedResult]:
    """The results of these seeds, as they come. Whoever stops reading ends the processes."""
    if jobs == 1 or len(seeds) == 1:
        yield from (try_seed(seed, kept) for seed in seeds)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(seeds)), mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
    )
    waiting = iter(seeds)
    running: set[Future[SeedResult]] = set()
    try:
        while True:
            running |= {pool.submit(try_seed, seed, kept) for seed in islice(waiting, AHEAD * jobs - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def _begin_worker() -> None:
    """Ctrl-C goes to all processes of the terminal, and the first one ends the others. However it ends, they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
