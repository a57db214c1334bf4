"""Remembers what the engine reports about saves: those that training had to wait for, and those that failed. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec

from ckpt_engine.contracts.notices import SaveWaited
from flyball.contracts.on_host.engine_wire import FailingSaves, LateSaves, SaveFailure

REPORT_EVERY_S: Final = 60.0  # per rank: with a store that is too slow, every save is late
REMEMBERED_LATE: Final = 64

FAILING_AFTER_S: Final = 60.0  # since the first of two or more failures in a row
REPEAT_S: Final = 300.0
_REMEMBERED_FAILURES: Final = 64


class _SinceReport(msgspec.Struct):
    count: int = 0
    longest_s: float = 0.0
    generation: int = 0  # of the newest save
    step: int = 0
    reported_at: float | None = None


class LateSaveLog:
    """Of one job. A rank's first late save is reported at once, later ones together. Thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ranks: dict[int, _SinceReport] = {}
        self._reports: deque[LateSaves] = deque(maxlen=REMEMBERED_LATE)
        self._lock = threading.Lock()

    def note(self, notice: SaveWaited, now: float) -> None:
        """`now` is wall time. If it was set back, the save is reported at once."""
        with self._lock:
            since = self._ranks.setdefault(notice.rank, _SinceReport())
            since.count += 1
            since.longest_s = max(since.longest_s, notice.waited_s)
            since.generation, since.step = notice.generation, notice.step
            if since.reported_at is None or not 0.0 <= now - since.reported_at < REPORT_EVERY_S:
                self._report(notice.rank, now)

    def report_rest(self, now: float) -> list[LateSaves]:
        """The generation ends, and no later save may trigger a report."""
        with self._lock:
            return [self._report(rank, now) for rank, since in list(self._ranks.items()) if since.count > 0]

    def _report(self, rank: int, now: float) -> LateSaves:
        since = self._ranks[rank]
        report = LateSaves(self._job, since.generation, rank, since.step, since.longest_s, since.count, at=now)
        self._reports.append(report)
        self._ranks[rank] = _SinceReport(reported_at=now)
        return report

    def newest(self) -> list[LateSaves]:
        """The newest reports, oldest first."""
        with self._lock:
            return list(self._reports)


class _Row(msgspec.Struct):
    """One rank's failures since its last successful save."""

    since: float
    count: int = 0
    step: int = -1
    message: str = ""


class SaveFailures:
    """Of one job on one host. Times are wall clock; one that was set back delays reports. Thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._generation = -1
        self._remembered: deque[SaveFailure] = deque(maxlen=_REMEMBERED_FAILURES)
        self._rows: dict[int, _Row] = {}
        self._report: FailingSaves | None = None
        self._reported_at = 0.0
        self._lock = threading.Lock()

    def begin(self, generation: int) -> None:
        """Forget how saves went in the generation before."""
        with self._lock:
            self._generation, self._report = generation, None
            self._rows.clear()

    def remember(self, failure: SaveFailure) -> None:
        """A failure in any tier, for `newest`."""
        self._remembered.append(failure)

    def newest(self) -> list[SaveFailure]:
        """Oldest first."""
        return list(self._remembered)

    def failed(self, failure: SaveFailure) -> None:
        """The rank will never have this step in memory."""
        self.remember(failure)
        with self._lock:
            if failure.generation == self._generation:
                row = self._rows.setdefault(failure.rank, _Row(failure.at))
                row.count += 1
                row.step, row.message = max(row.step, failure.step), failure.message

    def kept(self, rank: int, newest_step: int, now: float) -> None:
        """The rank has this step committed and replicated."""
        with self._lock:
            row = self._rows.get(rank)
            if row is not None and newest_step > row.step:
                del self._rows[rank]
            if self._report is None and newest_step >= 0:
                # After an engine restart: the engine before may have reported failures.
                self._make_report((), _Row(0.0, step=newest_step), now)

    def failing(self, now: float) -> FailingSaves | None:
        """The report, the same until something changes. None while nothing is known."""
        with self._lock:
            long = {r: row for r, row in self._rows.items() if row.count > 1 and now - row.since >= FAILING_AFTER_S}
            before = self._report.ranks if self._report else ()
            if tuple(sorted(long)) != before or (long and now - self._reported_at >= REPEAT_S):
                first = min(long.values(), key=lambda row: row.since, default=None)
                self._make_report(tuple(sorted(long)), first or self._over(), now)
            return self._report

    def _over(self) -> _Row:
        assert self._report is not None  # ranks were reported to fail
        return _Row(self._report.since, self._report.count, self._report.step)

    def _make_report(self, ranks: tuple[int, ...], row: _Row, now: float) -> None:
        self._report = FailingSaves(self._job, self._generation, ranks, row.since, row.count, row.step, row.message)
        self._reported_at = now
