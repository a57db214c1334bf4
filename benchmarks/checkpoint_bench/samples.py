"""Repeated measurements: medians, spreads, and ratios of interleaved pairs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

Spread = dict[str, object]


def spread(values: Sequence[float], digits: int = 5) -> Spread:
    """Median, extremes and every value in the order in which it was measured."""
    rounded = [round(value, digits) for value in values]
    return {
        "median": round(statistics.median(values), digits),
        "min": min(rounded),
        "max": max(rounded),
        "runs": rounded,
    }


def with_error(values: Sequence[float]) -> Spread:
    """Also the mean and its standard error, for what scatters by more than its size."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": round(statistics.fmean(values), 4), "standard_error": round(error, 4), **spread(values)}


def ratios(values: Sequence[float], floors: Sequence[float]) -> list[float]:
    """Each value over the floor that was measured beside it."""
    return [value / floor for value, floor in zip(values, floors, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def interleaved(
    actions: dict[str, Callable[[], float]], repeats: int, *, what: str, between: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Run every action `repeats` times in turns, the order reversed every other time, so that a drift of the machine
    meets all of them alike. An action returns what it measured; `between` runs before each, unmeasured."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats):
        for name in list(actions) if repeat % 2 == 0 else reversed(actions):
            if between is not None:
                between()
            found[name].append(actions[name]())
        progress(f"{what} {repeat + 1}/{repeats}: " + ", ".join(f"{n} {v[-1]:.4g}" for n, v in found.items()))
    return found


def progress(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0, poll_s: float = 0.0002) -> None:
    """Poll until the condition holds; raises TimeoutError that says what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(poll_s)
