"""Computes quantiles of measured times and of Prometheus histograms."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_QUANTILES = {"p50": (0.5, 50), "p90": (0.9, 100), "p99": (0.99, 1_000), "max": (1.0, 1)}  # with the samples needed


def quantiles_ms(seconds: Collection[float]) -> dict[str, float | None]:
    """Return quantiles in milliseconds, and the number of samples; None for quantiles that need more of these."""
    ordered = sorted(seconds)
    found: dict[str, float | None] = {"samples": len(ordered)}
    for name, (part, needed) in _QUANTILES.items():
        place = min(len(ordered) - 1, int(part * len(ordered)))
        found[name] = round(1000.0 * ordered[place], 2) if len(ordered) >= needed else None
    return found


def histogram_quantiles(samples: Mapping[str, float], name: str, labels: str = "") -> dict[str, float | None]:
    """Return quantiles of a Prometheus histogram in milliseconds: the upper bound of each quantile's bucket. `labels`:
    as in 'kind="steady",'."""
    pattern = re.compile(f'{name}_bucket{{{labels}le="(.+)"}}')
    buckets = sorted((float(found[1]), count) for key, count in samples.items() if (found := pattern.fullmatch(key)))
    total = buckets[-1][1] if buckets else 0.0
    return {"samples": total} | {
        label: next((round(1000.0 * bound, 2) for bound, count in buckets if total and count >= part * total), None)
        for label, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
