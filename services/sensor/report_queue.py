"""The bounded queue between the event loop, which takes reports, and the thread that stores them."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from flyball.contracts.signals import Report, Signal


class Received(msgspec.Struct, frozen=True):
    """What waits to be stored: a report, or (report None) signals that the sensor raised itself."""

    report: Report | None
    signals: tuple[Signal, ...]
    size_bytes: int
    at: float  # wall clock
    at_monotonic_s: float


class ReportQueue:
    """First in, first out; bounded by number and by bytes. Thread-safe."""

    def __init__(self, *, max_items: int, max_size_bytes: int) -> None:
        self._max_items = max_items
        self._max_size_bytes = max_size_bytes
        self._items: deque[Received] = deque()
        self._size_bytes = 0
        self._changed = threading.Condition()

    def offer(self, item: Received) -> bool:
        """Append unless full. The sensor's own signals are always taken: there is one per host or generation in
        trouble, and nobody would send them again."""
        with self._changed:
            full = len(self._items) >= self._max_items or self._size_bytes + item.size_bytes > self._max_size_bytes
            if full and item.report is not None:
                return False
            self._items.append(item)
            self._size_bytes += item.size_bytes
            self._changed.notify()
            return True

    def take(self, *, max_items: int, timeout_s: float) -> list[Received]:
        """The oldest items; waits up to `timeout_s` for the first."""
        with self._changed:
            if not self._items and timeout_s > 0.0:
                self._changed.wait(timeout_s)
            taken = [self._items.popleft() for _ in range(min(max_items, len(self._items)))]
            self._size_bytes -= sum(item.size_bytes for item in taken)
            return taken

    def __len__(self) -> int:
        return len(self._items)
