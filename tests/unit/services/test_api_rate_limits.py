"""How often one user may ask."""

from __future__ import annotations

import pytest

from flyball.contracts.errors import TooBusy
from services.api import rate_limits
from services.api.rate_limits import RateLimits


def test_a_burst_then_the_rate() -> None:
    limits = RateLimits(10.0)
    for _ in range(50):
        limits.take("reader", "10.0.0.1", 100.0)
    with pytest.raises(TooBusy, match="More than 10 requests per second came from 10\\.0\\.0\\.1") as refused:
        limits.take("reader", "10.0.0.1", 100.0)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    limits.take("operator", "10.0.0.1", 100.0)
    limits.take("reader", "10.0.0.2", 100.0)
    limits.take("reader", "10.0.0.1", 100.1)
    with pytest.raises(TooBusy):
        limits.take("reader", "10.0.0.1", 100.1)
    limits.take("reader", "10.0.0.1", 1e9)


def test_a_refused_request_costs_nothing_and_zero_is_no_limit() -> None:
    limits = RateLimits(0.2)
    limits.take("reader", "a", 0.0)
    for at_s in (1.0, 2.0, 4.9):
        with pytest.raises(TooBusy):
            limits.take("reader", "a", at_s)
    limits.take("reader", "a", 5.1)
    for _ in range(10_000):
        RateLimits(0.0).take("reader", "a", 0.0)


def test_the_number_of_buckets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MAX_BUCKETS", 2)
    limits = RateLimits(0.2)
    limits.take("reader", "a", 0.0)
    limits.take("reader", "b", 0.0)
    with pytest.raises(TooBusy):
        limits.take("reader", "b", 0.0)
    limits.take("reader", "c", 0.0)
    limits.take("reader", "a", 0.0)  # forgotten
    assert len(limits._buckets) == 2
