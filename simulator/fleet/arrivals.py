"""When faults happen: one random stream for each cause, so that another cause shifts none of them.

A stream's seed is a hash of the run's seed and the cause's name: the same in every process, whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from random import Random

from simulator.fleet.scenario import Cause, Distribution


def stream(seed: int, name: str) -> Random:
    """A random stream of this name."""
    return Random(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big"))


def arrivals(cause: Cause, rate_per_s: float, rng: Random) -> Iterator[float]:
    """The moments of a cause's faults, in seconds from the start, without end unless it is a trace.

    Weibull: the times between two faults have the mean 1 / rate, whatever the shape.
    """
    if cause.distribution is Distribution.TRACE:
        yield from sorted(cause.at_s)
        return
    if rate_per_s <= 0.0:
        return
    scale_s = 1.0 / rate_per_s / math.gamma(1.0 + 1.0 / cause.shape)
    at_s = 0.0
    while True:
        is_weibull = cause.distribution is Distribution.WEIBULL
        at_s += rng.weibullvariate(scale_s, cause.shape) if is_weibull else rng.expovariate(rate_per_s)
        yield at_s
