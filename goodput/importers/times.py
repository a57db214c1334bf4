"""Wall-clock times as logs write them. Pure.

When summer time ends an hour comes twice on the clock, and times without an offset do not say which of the two they are
of. What a file says first is taken for the first; what then would go back in time is taken for the second. So of that
hour the order of lines counts, and a line that is repeated more than a minute later is taken for another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from flyball.contracts.errors import UsageError
from goodput.events import Line, Refusals
from goodput.importers.records import Unusable, moment_of, number_in

# 2026-01-31 12:00:05,123 · 2026-01-31T12:00:05.123456789Z · 2026-01-31T12:00:05+08:00
STAMP = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)\Z")
_OUT_OF_ORDER_S = 60.0  # lines of one file, as several writers leave them
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def zone(name: str) -> tzinfo:
    """The zone of times that name none: `UTC`, an offset as `+02:00`, or a name as `Europe/Berlin`. Raises UsageError
    for any other."""
    if name.upper() in ("", "UTC", "Z"):
        return UTC
    if offset := _OFFSET.match(name):
        seconds = int(offset[2]) * 3600 + int(offset[3]) * 60
        if seconds < 24 * 3600:
            return timezone(timedelta(seconds=seconds if offset[1] == "+" else -seconds))
    try:
        return ZoneInfo(name)
    except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError where no data is installed
        raise UsageError(f"There is no time zone {name!r}.", hint="use UTC, +02:00 or Europe/Berlin") from error
    except KeyError as error:
        raise UsageError(f"There is no time zone {name!r}.", hint="use UTC, +02:00 or Europe/Berlin") from error


class Clock:
    """Reads the times of one file, in the order of its lines; those without an offset are of `zone`."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._last = -math.inf
        self.came_twice = False  # some were taken for the second passage of an hour

    def from_stamp(self, text: str) -> float:
        """Wall-clock seconds of an ISO 8601 time. Raises Unusable."""
        try:
            return self._seconds(datetime.fromisoformat(text))
        except ValueError:
            raise Unusable(f"{text[:60]!r} is no time: ISO 8601 is expected") from None

    def from_format(self, text: str, pattern: str) -> float:
        """As `from_stamp`, written after a pattern of `strptime`."""
        try:
            return self._seconds(datetime.strptime(text, pattern))
        except ValueError:
            raise Unusable(f"{text[:60]!r} is no time of the form {pattern!r}") from None

    def _seconds(self, at: datetime) -> float:
        if at.tzinfo is None:
            at = at.replace(tzinfo=self._zone)
        try:
            first, second = (at.replace(fold=fold).timestamp() for fold in (0, 1))
        except OverflowError:
            first = second = -1.0
        earliest = self._last - _OUT_OF_ORDER_S
        again = first < earliest <= second
        self.came_twice |= again
        self._last = moment_of(second if again else first)
        return self._last


def clocks(lines: Iterable[Line], zone: tzinfo, refusals: Refusals) -> Iterator[tuple[Line, Clock]]:
    """Every line with the clock of its file."""
    clock, file = Clock(zone), ""
    for line in lines:
        if line.file != file:
            clock, file = Clock(zone), line.file
        told = clock.came_twice
        yield line, clock
        if clock.came_twice and not told:
            refusals.assumed.append(
                f"{file}: from line {line.number} on, times of the hour that comes twice when summer time ends are of"
                " its second passage, since time would go back otherwise."
            )


def from_number(text: str, unit: str) -> float:
    """Wall-clock seconds of a number of seconds (`s`), `ms`, `us` or `ns` since 1970. Raises Unusable."""
    return moment_of(number_in(text, scale_of(unit)))


def scale_of(unit: str) -> float:
    """What one of `unit` is in seconds. Raises UsageError for a unit that is none."""
    try:
        return _UNITS[unit]
    except KeyError:
        raise UsageError(f"There is no unit {unit!r}.", hint=f"use one of {', '.join(_UNITS)}") from None
