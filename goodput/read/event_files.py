"""Event logs as files: one JSON object per line, an `Event` each (docs/goodput.md). Logs of other tools come in through
`goodput.read.importers`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from flyball.contracts.errors import ConfigurationError, InvalidMessage, NotFound
from flyball.contracts.events import Event
from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, decode, decoder_of, encode

MAX_NAMED_LINES = 100  # further malformed lines are counted, not named


class MalformedLine(msgspec.Struct, frozen=True):
    """A line that is no event, and why; `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class ReadEvents(msgspec.Struct, frozen=True):
    """What was read: the events, and what had to be left out."""

    events: tuple[Event, ...]
    malformed: tuple[MalformedLine, ...]  # the first MAX_NAMED_LINES
    malformed_count: int
    assumed: tuple[str, ...] = ()  # of the lines that were read, where they leave it open


class LogLine(NamedTuple):
    """A line of a log that is not blank, without its end; `number` counts from 1."""

    file: str
    number: int
    data: bytes


class MalformedLines:
    """Malformed lines: all are counted, the first are named; with `strict` the first raises. Beside them what was
    assumed of the others."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.named: list[MalformedLine] = []
        self.count = 0
        self.assumed: list[str] = []
        self.unclear: dict[str, frozenset[float]] = {}  # file -> times of it that turned out to be refused

    def add(self, line: LogLine, reason: str) -> None:
        """Leave `line` out. Raises InvalidMessage if malformed lines are not to be left out."""
        found = MalformedLine(line.file, line.number, reason)
        if self._strict:
            raise InvalidMessage(str(found), hint="repair the line, or read the log without --strict")
        self.count += 1
        if len(self.named) < MAX_NAMED_LINES:
            self.named.append(found)

    def log(self, events: Iterable[Event]) -> ReadEvents:
        """`events`, read to their end, and then what was refused."""
        read = tuple(events)
        return ReadEvents(read, tuple(self.named), self.count, tuple(self.assumed))


def read_logs(paths: Sequence[Path | str], *, strict: bool = False) -> ReadEvents:
    """The events of all files, and of the `*.jsonl` of all folders, together. Malformed lines are counted and named;
    with `strict` the first one raises InvalidMessage. Raises NotFound for a file that does not exist."""
    refusals = MalformedLines(strict=strict)
    return refusals.log(event for path in log_files(paths) for event in read_events(path, refusals))


def read_events(path: Path, refusals: MalformedLines) -> Iterator[Event]:
    """The events of a file, one by one as they are read: whoever does not keep them can go through logs of any size."""
    decode_event = decoder_of(Event).decode
    number = 0
    with _open(path, "rb") as file:
        while line := file.readline(MAX_MESSAGE_BYTES + 1):
            number += 1
            if len(line) <= MAX_MESSAGE_BYTES:
                try:
                    event = decode_event(line)
                except MALFORMED:
                    pass  # blank, or refused below with the reason
                else:
                    if math.isfinite(event.at):
                        yield event
                        continue
            _skip_rest(file, line)
            if line.strip():
                try:
                    yield parse_event(line.rstrip(b"\r\n"))
                except InvalidMessage as error:
                    refusals.add(LogLine(str(path), number, line), error.message)


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


def log_files(paths: Sequence[Path | str]) -> list[Path]:
    """The files that `paths` name, each once: a folder stands for its `*.jsonl`, as trainers write them, one per rank.
    Raises NotFound for a folder without any."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise NotFound(f"The folder {path} has no event log.", hint="name a folder with *.jsonl files, or a file")
        files += found
    return list(dict.fromkeys(files))


def read_lines(path: Path) -> Iterator[LogLine]:
    """Lines with their numbers, blank ones left out. No more of a line is kept than an event may have and one byte,
    by which it is refused."""
    with _open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_MESSAGE_BYTES + 1):
            number += 1
            _skip_rest(file, line)
            if line.strip():
                yield LogLine(str(path), number, line.rstrip(b"\r\n"))


def _skip_rest(file: IO[bytes], line: bytes) -> None:
    """Go on to the next line where this one was longer than what was read of it."""
    while not line.endswith(b"\n") and (line := file.readline(MAX_MESSAGE_BYTES)):
        pass


def _open(path: Path, mode: Literal["rb", "ab"]) -> IO[bytes]:
    try:
        return path.open(mode)
    except FileNotFoundError as error:
        raise NotFound(f"There is no event log {path}.", hint="name a file of JSON lines") from error
    except OSError as error:
        raise ConfigurationError(
            f"Cannot open the event log {path}: {error.strerror}.", hint="check the path and its permissions"
        ) from error
