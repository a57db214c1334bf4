"""How long to wait before a failed attempt is repeated. Pure: the source of randomness is passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

_MAX_EXPONENT = 64  # beyond it every pause is the longest one, and a float would overflow at 1024
_SPREAD = 0.25  # by jitter, in both directions: the mean stays


def pause_s(failures: int, *, first_s: float, longest_s: float, factor: float = 2.0) -> float:
    """The pause in seconds after this many failures in a row, 1 or more: `first_s`, then `factor` times longer each."""
    return min(first_s * factor ** min(failures - 1, _MAX_EXPONENT), longest_s)


class Backoff:
    """The pauses of one loop that repeats a failing operation."""

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        factor: float = 2.0,
        jitter: Random | None = None,
    ) -> None:
        """`jitter`: a seeded source that spreads each pause over 0.75 to 1.25 of its length, the longest one too.
        This keeps many hosts from retrying in step, and pauses are as long on average as without it."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._jitter = jitter
        self._failures = 0

    def failed(self) -> float:
        """Count a failure. Returns the seconds to wait before the next attempt."""
        self._failures += 1
        pause = pause_s(self._failures, first_s=self._first_s, longest_s=self._longest_s, factor=self._factor)
        return pause if self._jitter is None else pause * self._jitter.uniform(1.0 - _SPREAD, 1.0 + _SPREAD)

    def succeeded(self) -> None:
        """The next failure is the first again."""
        self._failures = 0
