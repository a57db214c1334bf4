"""Computes quantiles of measured times and of Prometheus histograms."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def quantiles_ms(seconds: Collection[float]) -> dict[str, float | None]:
    """Return quantiles in milliseconds; None if there are no values."""
    ordered = sorted(seconds)
    if not ordered:
        return dict.fromkeys(_QUANTILES)
    return {
        name: round(1000.0 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2)
        for name, part in _QUANTILES.items()
    }


def histogram_quantiles(samples: Mapping[str, float], name: str) -> dict[str, float | None]:
    """Return quantiles of a Prometheus histogram in milliseconds: the upper bound of each quantile's bucket."""
    buckets = sorted(
        (float(found[1]), count)
        for key, count in samples.items()
        if (found := re.match(name + r'_bucket{le="(.+)"}', key))
    )
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return {"p50": None, "p99": None}
    return {
        label: next(round(1000.0 * bound, 2) for bound, count in buckets if count >= part * total)
        for label, part in (("p50", 0.5), ("p99", 0.99))
    }
