"""Moments as people type them: ISO 8601, seconds since 1970, or relative to the run."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

import msgspec

from flyball.contracts.errors import UsageError

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_RELATIVE = re.compile(rf"([+-]?)((?:{_PART.pattern})+)")
_EARLIEST_S = 1e9  # September 2001
_HINT = "for example 2026-11-20T14:30 (UTC unless it says otherwise), 1795187400, 2h (before the end) or +30m"


class Moment(msgspec.Struct, frozen=True):
    """A point of a run's time: of the three one is given."""

    at: float | None = None  # wall clock
    before_end_s: float | None = None
    after_start_s: float | None = None

    def resolve(self, start: float, end: float) -> float:
        """Wall clock, in seconds, for a run over [start, end]."""
        if self.at is not None:
            return self.at
        return start + self.after_start_s if self.after_start_s is not None else end - (self.before_end_s or 0.0)


def parse_moment(flag: str, text: str) -> Moment | None:
    """`2h` is two hours before the end of what is reported (now, while the job runs), `+2h` two hours after its start.
    None for ''. Raises UsageError."""
    text = text.strip()
    if not text:
        return None
    if relative := _RELATIVE.fullmatch(text):
        length_s = math.fsum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(relative[2]))
        return Moment(after_start_s=length_s) if relative[1] == "+" else Moment(before_end_s=length_s)
    try:
        at = float(text)
    except ValueError:
        pass
    else:
        # A day that is written without hyphens, or a year, would be a moment in 1970.
        return Moment(at=at) if _EARLIEST_S <= at < math.inf else _refuse(flag, text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return _refuse(flag, text)
    return Moment(at=(found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())


def parse_duration(flag: str, text: str) -> float:
    """Seconds of `90`, `90s`, `1h30m`. Raises UsageError."""
    if (found := _RELATIVE.fullmatch(text.strip())) and not found[1]:
        return math.fsum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(found[2]))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{flag} {text} is not a length of time.", hint="seconds, or for example 90s, 5m, 1h30m")
    return value


def _refuse(flag: str, text: str) -> Moment:
    raise UsageError(f"{flag} {text} is not a moment.", hint=_HINT)
