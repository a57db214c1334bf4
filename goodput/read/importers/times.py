"""Wall-clock times as logs write them. Pure.

When summer time ends an hour comes twice on the clock, and times without an offset do not say which of the two they are
of. What a file says first is taken for the first; what then would go back in time is taken for the second. So of that
hour the order of lines counts, and a line that is repeated more than a minute later is taken for another. In a file
whose lines are in no order nobody can tell: those of that hour are refused. When summer time begins an hour is skipped:
times of it are refused too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from flyball.contracts.errors import UsageError
from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.records import Unusable, moment_of, number_in

# 2026-01-31 12:00:05,123 · 2026-01-31T12:00:05.123456789Z · 2026-01-31T12:00:05+08:00
STAMP = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)\Z")
_OUT_OF_ORDER_S = 60.0  # lines of one file, as several writers leave them
_CANNOT_TELL = (
    "of the hour that comes twice when summer time ends, in a file whose lines are in no order: sort it by time, or"
    " name the offset with --map tz=+01:00"
)
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


class TimestampReader:
    """Reads the times of one file, in the order of its lines; those without an offset are of `zone`."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._last = -math.inf
        self._is_in_order = True
        self.unclear: set[float] = set()  # times of an hour that comes twice, as they were read
        self.unclear_lines: list[int] = []
        self.came_twice = False  # some were taken for the second passage of an hour
        self.line = self.second_from = 0  # that is being read, and the first of the second passage

    @property
    def cannot_tell(self) -> bool:
        """Whether there are times of an hour that comes twice, and no order that says of which passage."""
        return bool(self.unclear) and not self._is_in_order

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
        if second < first:
            raise Unusable(f"{at.replace(tzinfo=None)} is no time of {self._zone}: it is skipped as summer time begins")
        earliest = self._last - _OUT_OF_ORDER_S
        again = first < earliest <= second
        self._is_in_order &= earliest <= second
        if again and not self.came_twice:
            self.came_twice, self.second_from = True, self.line
        self._last = moment_of(second if again else first)
        if first < second:
            self.unclear.add(self._last)
            self.unclear_lines.append(self.line)
        return self._last


def clocks(
    lines: Iterable[LogLine], zone: tzinfo, refusals: MalformedLines
) -> Iterator[tuple[LogLine, TimestampReader]]:
    """Every line with the clock of its file. Times that turn out to be unclear at the file's end are refused:
    `refusals.unclear`."""
    clock, file = TimestampReader(zone), ""
    for line in lines:
        if line.file != file:
            _judge(clock, file, refusals)
            clock, file = TimestampReader(zone), line.file
        clock.line = line.number
        yield line, clock
    _judge(clock, file, refusals)


def _judge(clock: TimestampReader, file: str, refusals: MalformedLines) -> None:
    """What is to be said of a file that was read."""
    if not clock.unclear:
        return
    if clock.cannot_tell:
        refusals.unclear[file] = frozenset(clock.unclear)
        for number in clock.unclear_lines:
            refusals.add(LogLine(file, number, b""), _CANNOT_TELL)
    elif clock.came_twice:
        refusals.assumed.append(
            f"{file}: from line {clock.second_from} on, times of the hour that comes twice when summer time ends are of"
            " its second passage, since time would go back otherwise."
        )
    else:
        refusals.assumed.append(
            f"{file}: from line {clock.unclear_lines[0]} on, times of the hour that comes twice when summer time ends"
            " were taken for its first passage: none of them goes back."
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
