"""How much of a busy process a thread may take whose work can wait."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_SHARE = 1 / 8  # of a core
MIN_SHARE = 1 / 32  # however busy the others are: what waits for ever is lost


class SpareTime:
    """For one thread, in turns of work and rest: it takes a half of what the process's other threads leave of the one
    core that the interpreter's lock gives them all, within bounds. As the others grow into what it leaves, it takes the
    least when they are at their limit, and the most when they are at ease."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float],
        process_s: Callable[[], float] = time.process_time,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`process_s`, `thread_s`: processor time of the process and of the calling thread. A turn begins now."""
        self._monotonic_s = monotonic_s
        self._process_s = process_s
        self._thread_s = thread_s
        self._rested_from = self._began = self._now()

    def begin(self) -> None:
        """The thread has rested, or waited for something to do, and works now."""
        self._began = self._now()

    def rest_s(self) -> float:
        """The work is done: how long to rest."""
        wall_s, process_s, thread_s = self._now()
        elapsed_s = wall_s - self._rested_from[0]
        others_s = process_s - self._rested_from[1] - (thread_s - self._rested_from[2])
        left = 1.0 - others_s / elapsed_s if elapsed_s > 0.0 else 0.0
        share = min(MAX_SHARE, max(MIN_SHARE, left / 2))
        next_s = self._began[0] + (thread_s - self._began[2]) / share
        self._rested_from = (wall_s, process_s, thread_s)
        return max(0.0, next_s - wall_s)

    def _now(self) -> tuple[float, float, float]:
        return self._monotonic_s(), self._process_s(), self._thread_s()
