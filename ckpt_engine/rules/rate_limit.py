"""Bandwidth limits as token buckets. Pure: the caller supplies the clock and the sleep.

All writers that share a disk or a network card share one `RateLimit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BURST_S = 0.1  # after a pause this many seconds' worth of bytes may go at once


class TokenBucket:
    """Limits to `bytes_per_s` on average, plus one burst. A take may go into debt, so a piece larger than the burst is
    delayed but possible."""

    def __init__(self, bytes_per_s: int, *, now_s: float, burst_s: float = BURST_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = bytes_per_s * burst_s
        self._tokens = self._burst_bytes
        self._at_s = now_s

    def take(self, size_bytes: int, *, now_s: float) -> float:
        """The seconds to wait before these bytes may go. They are counted at once."""
        self._tokens = min(self._burst_bytes, self._tokens + (now_s - self._at_s) * self._bytes_per_s)
        self._at_s = now_s
        self._tokens -= size_bytes
        return max(0.0, -self._tokens / self._bytes_per_s)


class RateLimit:
    """One bucket for many threads. `bytes_per_s` 0 means no limit."""

    def __init__(self, bytes_per_s: int, *, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._bucket = TokenBucket(bytes_per_s, now_s=monotonic_s()) if bytes_per_s > 0 else None
        self._lock = threading.Lock()

    def wait(self, size_bytes: int, sleep: Callable[[float], object]) -> None:
        """Call before sending `size_bytes`. `sleep(seconds)` waits; pass an event's `wait` to be woken early. The wait
        lasts at most (bytes requested by all threads) / rate."""
        if self._bucket is None:
            return
        with self._lock:
            seconds = self._bucket.take(size_bytes, now_s=self._monotonic_s())
        if seconds > 0:
            sleep(seconds)


class Throttle:
    """One user's access to a `RateLimit`, which it may lift for itself. Waiting threads then go on at once."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lifts = 0
        self._lifted = threading.Event()

    def wait(self, size_bytes: int) -> None:
        """Call before sending `size_bytes`. While the limit is lifted, bytes are not counted."""
        if not self._lifted.is_set():
            self._limit.wait(size_bytes, self._lifted.wait)

    def lift(self) -> None:
        """Lift the limit for good."""
        with self._lock:
            self._lifts += 1
            self._lifted.set()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lift the limit for the body of the with statement."""
        self.lift()
        try:
            yield
        finally:
            with self._lock:
                self._lifts -= 1
                if self._lifts == 0:
                    self._lifted.clear()
