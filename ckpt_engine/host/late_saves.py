"""Saves that training had to wait for. All are counted; they are reported together, from time to time. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec

from ckpt_engine.contracts.notices import SaveWaited
from flyball.contracts.on_host.engine_wire import LateSaves

REPORT_EVERY_S: Final = 60.0  # per rank: with a store that is too slow, every save is late
REMEMBERED_LATE: Final = 64


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
