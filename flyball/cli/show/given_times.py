"""Parse times as users type them: ISO 8601, seconds since 1970, or relative to the run. Pure."""

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
_HINT = "write for example 2026-11-20T14:30 (UTC by default), 1795187400, 2h (before the end) or +30m (into the run)"


class Moment(msgspec.Struct, frozen=True):
    """A point in a run's time. Exactly one field is set."""

    at: float | None = None  # wall clock
    before_end_s: float | None = None
    after_start_s: float | None = None

    def resolve(self, start: float, end: float) -> float:
        """Wall clock in seconds, for a run over [start, end]."""
        if self.at is not None:
            return self.at
        return start + self.after_start_s if self.after_start_s is not None else end - (self.before_end_s or 0.0)


def parse_moment(flag: str, text: str) -> Moment | None:
    """Parse `2h` (before the end of the run, or before now while it runs), `+2h` (after its start), or a date.

    None for ''. Raises UsageError.
    """
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
        # Refuse 20261120 or 2026, which would mean a moment in 1970.
        return Moment(at=at) if _EARLIEST_S <= at < math.inf else _refuse(flag, text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return _refuse(flag, text)
    return Moment(at=(found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())


def parse_duration(flag: str, text: str) -> float:
    """Parse `90`, `90s` or `1h30m` into seconds. Raises UsageError."""
    if (found := _RELATIVE.fullmatch(text.strip())) and not found[1]:
        return math.fsum(float(n) * _UNIT_S[unit] for n, unit in _PART.findall(found[2]))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{flag} {text} is not a duration.", hint="write seconds, or for example 90s, 5m, 1h30m")
    return value


def _refuse(flag: str, text: str) -> Moment:
    raise UsageError(f"{flag} {text} is not a point in time.", hint=_HINT)
