"""How sure a mean is: Student's t interval, of values or of paired differences. Pure.

Two scenarios that run with the same seeds have the same faults, so the difference of a pair varies far less than either
run does. With the few seeds that planners use, a bootstrap's intervals are too narrow; t intervals are right for
differences that are about normal, which means of many interruptions are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds, and where it lies with 95 % confidence; low and high are None with one
    seed, and where a value is infinite: the cost of an hour of which none was useful."""

    mean: float  # nan: both of a pair are infinite
    low: float | None
    high: float | None
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is sure. Never with one seed."""
        if self.seeds > 1 and math.isinf(self.mean):
            return True
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value."""
    mean, half = sum(values) / len(values), None
    if math.isfinite(mean):
        mean, half = fmean(values), _half_width(values)
    if half is None:
        return Estimate(mean, None, None, len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """The mean of b - a. Both have the same seeds in the same order."""
    return estimate([two - one for one, two in zip(a, b, strict=True)])


def seeds_to_see(found: Estimate) -> int | None:
    """About how many seeds would make the sign of this mean sure, if it stays what it is. None: cannot be told."""
    if found.low is None or found.high is None or found.mean == 0.0:
        return None
    half = (found.high - found.low) / 2.0
    return max(found.seeds + 1, math.ceil(found.seeds * (half / found.mean) ** 2))


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t distribution, by bisection of its exact probability."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2.0


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t), Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for k in range(3, degrees - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        return 2.0 / math.pi * (angle + sine * total)
    term = total = 1.0
    for k in range(2, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return sine * total
