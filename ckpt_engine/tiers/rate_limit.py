"""Bandwidth limits, as token buckets. Pure: time is read and passed through what the caller brings.

All writers that share one disk or one network card on a host share one `RateLimit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BURST_S = 0.1  # what may go at once after a pause, in seconds' worth of the rate


class TokenBucket:
    """`bytes_per_s` on the average, and never more than one burst ahead. Takes may go into debt, so that a piece larger
    than the burst is only late, and never impossible."""

    def __init__(self, bytes_per_s: int, *, now_s: float, burst_s: float = BURST_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = bytes_per_s * burst_s
        self._tokens = self._burst_bytes
        self._at_s = now_s

    def take(self, size_bytes: int, *, now_s: float) -> float:
        """Seconds to wait before these bytes may go. They count as gone from now on."""
        self._tokens = min(self._burst_bytes, self._tokens + (now_s - self._at_s) * self._bytes_per_s)
        self._at_s = now_s
        self._tokens -= size_bytes
        return max(0.0, -self._tokens / self._bytes_per_s)


class RateLimit:
    """One bucket for many threads; `bytes_per_s` 0 means that there is no limit."""

    def __init__(self, bytes_per_s: int, *, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._bucket = TokenBucket(bytes_per_s, now_s=monotonic_s()) if bytes_per_s > 0 else None
        self._lock = threading.Lock()

    def wait(self, size_bytes: int, sleep: Callable[[float], object]) -> None:
        """Call before `size_bytes` go; `sleep(seconds)` waits. Give an event's `wait` in order to be woken early: the
        caller then looks at its event. The wait ends after at most (bytes asked for by all threads) / rate."""
        if self._bucket is None:
            return
        with self._lock:
            seconds = self._bucket.take(size_bytes, now_s=self._monotonic_s())
        if seconds > 0:
            sleep(seconds)


class Throttle:
    """A `RateLimit` for one user of it, which may lift it for itself: who waits then is woken at once."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lifts = 0
        self._lifted = threading.Event()

    def wait(self, size_bytes: int) -> None:
        """Call before `size_bytes` go. What goes while the limit is lifted is not counted."""
        if not self._lifted.is_set():
            self._limit.wait(size_bytes, self._lifted.wait)

    def lift(self) -> None:
        """For good."""
        with self._lock:
            self._lifts += 1
            self._lifted.set()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For the body of the with statement."""
        self.lift()
        try:
            yield
        finally:
            with self._lock:
                self._lifts -= 1
                if self._lifts == 0:
                    self._lifted.clear()
