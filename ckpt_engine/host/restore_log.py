"""The newest restores of an engine, of all its jobs, for the daemon that asks for those after a moment."""

from __future__ import annotations

import threading
from collections import deque
from math import inf, nextafter

import msgspec

from flyball.contracts.checkpoints import RestoreReport

_REMEMBERED = 256


class RestoreLog:
    """Thread-safe. Ranks are restored side by side, and the clock may be set back: so that nobody who was told of one
    misses what comes after it, each has a later moment than the one before."""

    def __init__(self) -> None:
        self._reports: deque[RestoreReport] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def add(self, report: RestoreReport) -> None:
        with self._lock:
            if self._reports and report.at <= self._reports[-1].at:
                report = msgspec.structs.replace(report, at=nextafter(self._reports[-1].at, inf))
            self._reports.append(report)

    def since(self, at: float) -> tuple[RestoreReport, ...]:
        """Restores whose bytes were verified after this wall time."""
        with self._lock:
            return tuple(report for report in self._reports if report.at > at)
