"""Saves that failed: each is remembered, and when a rank's saves fail for long that is said once, until one is kept
again. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec

from flyball.contracts.on_host.engine_wire import FailingSaves, SaveFailure

FAILING_AFTER_S: Final = 60.0  # since the first of at least two that failed with none kept in between
SAY_AGAIN_S: Final = 300.0
_REMEMBERED_FAILURES: Final = 64


class _Row(msgspec.Struct):
    """Of one rank, since its saves were kept last."""

    since: float
    count: int = 0
    step: int = -1
    message: str = ""


class SaveFailures:
    """Of one job on one host. Moments are wall clock; a clock that was set back says nothing new."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._generation = -1
        self._remembered: deque[SaveFailure] = deque(maxlen=_REMEMBERED_FAILURES)
        self._rows: dict[int, _Row] = {}
        self._said: FailingSaves | None = None
        self._said_at = 0.0
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """What failed in the generation before says nothing of this one."""
        with self._lock:
            self._generation, self._said = generation, None
            self._rows.clear()

    def remember(self, failure: SaveFailure) -> None:
        """One that is told of, whatever tier it is of."""
        self._remembered.append(failure)

    def newest(self) -> list[SaveFailure]:
        """Oldest first."""
        return list(self._remembered)

    def failed(self, failure: SaveFailure) -> None:
        """The rank will never have this step."""
        self.remember(failure)
        with self._lock:
            if failure.generation == self._generation:
                row = self._rows.setdefault(failure.rank, _Row(failure.at))
                row.count += 1
                row.step, row.message = max(row.step, failure.step), failure.message

    def kept(self, rank: int, newest_step: int, now: float) -> None:
        """The rank has this step, committed and replicated."""
        with self._lock:
            row = self._rows.get(rank)
            if row is not None and newest_step > row.step:
                del self._rows[rank]
            if self._said is None and newest_step >= 0:
                self._say((), _Row(0.0, step=newest_step), now)  # an engine that follows another one knows no better

    def failing(self, now: float) -> FailingSaves | None:
        """What is to be said; the same until it changes. None while nothing is known."""
        with self._lock:
            long = {r: row for r, row in self._rows.items() if row.count > 1 and now - row.since >= FAILING_AFTER_S}
            before = self._said.ranks if self._said else ()
            if tuple(sorted(long)) != before or (long and now - self._said_at >= SAY_AGAIN_S):
                first = min(long.values(), key=lambda row: row.since, default=None)
                self._say(tuple(sorted(long)), first or self._over(), now)
            return self._said

    def _over(self) -> _Row:
        assert self._said is not None  # ranks were said to fail
        return _Row(self._said.since, self._said.count, self._said.step)

    def _say(self, ranks: tuple[int, ...], row: _Row, now: float) -> None:
        self._said = FailingSaves(self._job, self._generation, ranks, row.since, row.count, row.step, row.message)
        self._said_at = now
