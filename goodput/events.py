"""Event logs as files: one JSON object per line, an `Event` each (docs/goodput.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec

from flyball.contracts.errors import ConfigurationError, InvalidMessage, NotFound
from flyball.contracts.events import Event
from flyball.contracts.wire import MAX_MESSAGE_BYTES, decode, encode

MAX_NAMED_LINES = 100  # further malformed lines are counted, not named


class MalformedLine(msgspec.Struct, frozen=True):
    """A line that is no event, and why; `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class EventLog(msgspec.Struct, frozen=True):
    """What was read: the events, and what had to be left out."""

    events: tuple[Event, ...]
    malformed: tuple[MalformedLine, ...]  # the first MAX_NAMED_LINES
    malformed_count: int


def read_logs(paths: Sequence[Path | str], *, strict: bool = False) -> EventLog:
    """The events of all files together. Malformed lines are counted and named; with `strict` the first one raises
    InvalidMessage. Raises NotFound for a file that does not exist."""
    events: list[Event] = []
    malformed: list[MalformedLine] = []
    count = 0
    for path in map(Path, paths):
        for number, line in _lines(path):
            try:
                events.append(parse_event(line))
            except InvalidMessage as error:
                count += 1
                found = MalformedLine(str(path), number, error.message)
                if strict:
                    raise InvalidMessage(
                        str(found), hint="repair the line, or read the log without --strict"
                    ) from error
                if len(malformed) < MAX_NAMED_LINES:
                    malformed.append(found)
    return EventLog(events=tuple(events), malformed=tuple(malformed), malformed_count=count)


def parse_event(line: bytes) -> Event:
    """One event from one line; raises InvalidMessage that says what is wrong with it."""
    event = decode(line, Event)
    if not math.isfinite(event.at):
        raise InvalidMessage("Not a valid Event: `at` is not a finite number.", hint="check the sender's clock")
    return event


def write_events(path: Path | str, events: Iterable[Event]) -> int:
    """Append events to a log, made if it is missing; returns how many."""
    count = 0
    with _open(Path(path), "ab") as file:
        for event in events:
            file.write(encode(event) + b"\n")
            count += 1
    return count


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, blank ones left out. No more of a line is kept than an event may have and one byte,
    by which it is refused."""
    with _open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_MESSAGE_BYTES + 1):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_MESSAGE_BYTES)):
                pass
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def _open(path: Path, mode: Literal["rb", "ab"]) -> IO[bytes]:
    try:
        return path.open(mode)
    except FileNotFoundError as error:
        raise NotFound(f"There is no event log {path}.", hint="name a file of JSON lines") from error
    except OSError as error:
        raise ConfigurationError(
            f"Cannot open the event log {path}: {error.strerror}.", hint="check the path and its permissions"
        ) from error
