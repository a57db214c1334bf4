"""Limits how often one user asks: a bucket for each token or login of a browser, and address. Daemons have none."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from flyball.contracts.errors import TooBusy

MAX_BUCKETS = 10_000  # the most recently used
ROUNDING = 1e-6
BURST_S = 5.0  # a bucket holds the requests of this long


class _Bucket(msgspec.Struct, gc=False):
    left: float
    at_s: float


class RateLimits:
    """Belongs to one event loop."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: requests per second; 0.0: no limit."""
        self._per_s = per_s
        self._burst = max(1.0, per_s * BURST_S)
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def take(self, user: str, client: str, now_s: float) -> None:
        """Count one request at `now_s` (monotonic). Raises TooBusy if it is one too many."""
        if not self._per_s:
            return
        key = (user, client)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= MAX_BUCKETS:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = _Bucket(self._burst, now_s)
        self._buckets.move_to_end(key)
        bucket.left = min(self._burst, bucket.left + (now_s - bucket.at_s) * self._per_s)
        bucket.at_s = now_s
        if bucket.left < 1.0 - ROUNDING:
            raise TooBusy(
                f"More than {self._per_s:g} requests per second came from {client or 'one client'}.",
                retry_after_s=(1.0 - bucket.left) / self._per_s,
                hint="ask less often, or follow /v1/stream; the setting max_requests_per_s is the limit",
            )
        bucket.left -= 1.0
