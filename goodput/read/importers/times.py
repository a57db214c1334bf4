"""Parses wall-clock times as logs write them. Pure.

When summer time ends, an hour occurs twice, and times without an offset are ambiguous. They are taken for the first
passage until time would go back; from there on for the second. So in that hour the order of lines matters, and a line
repeated more than a minute later counts as new. In a file with unordered lines the times of that hour are refused. When
summer time begins an hour is skipped; times in it are refused, too.
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
_OUT_OF_ORDER_S = 60.0  # within one file, due to several writers
_AMBIGUOUS = (
    "a time in the hour that occurs twice when summer time ends, in a file with unordered lines: sort it by time, or"
    " name the offset with --map tz=+01:00"
)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def zone(name: str) -> tzinfo:
    """The zone for times without one: `UTC`, an offset like `+02:00`, or a name like `Europe/Berlin`. Raises
    UsageError for anything else."""
    if name.upper() in ("", "UTC", "Z"):
        return UTC
    if offset := _OFFSET.match(name):
        seconds = int(offset[2]) * 3600 + int(offset[3]) * 60
        if seconds < 24 * 3600:
            return timezone(timedelta(seconds=seconds if offset[1] == "+" else -seconds))
    try:
        return ZoneInfo(name)
    except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError if no data is installed
        raise UsageError(f"There is no time zone {name!r}.", hint="use UTC, +02:00 or Europe/Berlin") from error
    except KeyError as error:
        raise UsageError(f"There is no time zone {name!r}.", hint="use UTC, +02:00 or Europe/Berlin") from error


class TimestampReader:
    """Reads the times of one file, in the order of its lines. Times without an offset are in `zone`."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._last = -math.inf
        self._is_in_order = True
        self.unclear: set[float] = set()  # times read that lie in an hour that occurs twice
        self.unclear_lines: list[int] = []
        self.came_twice = False  # some times were taken for the second passage
        self.line = self.second_from = 0  # the current line, and the first line of the second passage

    @property
    def is_ambiguous(self) -> bool:
        """Whether there are times of an hour that occurs twice, in unordered lines."""
        return bool(self.unclear) and not self._is_in_order

    def from_stamp(self, text: str) -> float:
        """Wall-clock seconds of an ISO 8601 time. Raises Unusable."""
        try:
            return self._seconds(datetime.fromisoformat(text))
        except ValueError:
            raise Unusable(f"{text[:60]!r} is not a time: expected ISO 8601") from None

    def from_format(self, text: str, pattern: str) -> float:
        """Like `from_stamp`, for a `strptime` pattern."""
        try:
            return self._seconds(datetime.strptime(text, pattern))
        except ValueError:
            raise Unusable(f"{text[:60]!r} is not a time of the form {pattern!r}") from None

    def _seconds(self, at: datetime) -> float:
        if at.tzinfo is None:
            at = at.replace(tzinfo=self._zone)
        try:
            first, second = (at.replace(fold=fold).timestamp() for fold in (0, 1))
        except OverflowError:
            first = second = -1.0
        if second < first:
            raise Unusable(f"{at.replace(tzinfo=None)} does not exist in {self._zone}: summer time skips it")
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
    """Yield every line with the clock of its file. Times that turn out ambiguous at the file's end go to
    `refusals.unclear`."""
    clock, file = TimestampReader(zone), ""
    for line in lines:
        if line.file != file:
            _close_file(clock, file, refusals)
            clock, file = TimestampReader(zone), line.file
        clock.line = line.number
        yield line, clock
    _close_file(clock, file, refusals)


def _close_file(clock: TimestampReader, file: str, refusals: MalformedLines) -> None:
    """Record refusals and assumptions for a file that has been read."""
    if not clock.unclear:
        return
    if clock.is_ambiguous:
        refusals.unclear[file] = frozenset(clock.unclear)
        for number in clock.unclear_lines:
            refusals.add(LogLine(file, number, b""), _AMBIGUOUS)
    elif clock.came_twice:
        refusals.assumed.append(
            f"{file}: from line {clock.second_from} on, times in the hour that occurs twice when summer time ends are"
            " taken for its second passage, because time would go back otherwise."
        )
    else:
        refusals.assumed.append(
            f"{file}: from line {clock.unclear_lines[0]} on, times in the hour that occurs twice when summer time ends"
            " are taken for its first passage: none of them goes back."
        )


def from_number(text: str, unit: str) -> float:
    """Wall-clock seconds from a number of seconds (`s`), `ms`, `us` or `ns` since 1970. Raises Unusable."""
    return moment_of(number_in(text, scale_of(unit)))


def scale_of(unit: str) -> float:
    """One `unit` in seconds. Raises UsageError for an unknown unit."""
    try:
        return _UNITS[unit]
    except KeyError:
        raise UsageError(f"There is no unit {unit!r}.", hint=f"use one of {', '.join(_UNITS)}") from None
