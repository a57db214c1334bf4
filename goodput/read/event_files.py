"""Event logs as files: JSON lines, one `Event` each (docs/reference/goodput/measures.md). `goodput.read.importers`
reads other tools' logs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from flyball.contracts.errors import ConfigurationError, InvalidMessage, NotFound
from flyball.contracts.events import Event
from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, decode, decoder_of, encode

MAX_NAMED_LINES = 100  # further malformed lines are only counted


class MalformedLine(msgspec.Struct, frozen=True):
    """A line that is not a valid event, and why; `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class ReadEvents(msgspec.Struct, frozen=True):
    """The events read, and the lines left out."""

    events: tuple[Event, ...]
    malformed: tuple[MalformedLine, ...]  # the first MAX_NAMED_LINES
    malformed_count: int
    assumed: tuple[str, ...] = ()  # assumptions about ambiguous lines


class LogLine(NamedTuple):
    """A non-blank line of a log, without its line end; `number` counts from 1."""

    file: str
    number: int
    data: bytes


class MalformedLines:
    """Collects malformed lines: counts all, names the first; with `strict` the first one raises. Also collects the
    assumptions made about other lines."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.named: list[MalformedLine] = []
        self.count = 0
        self.assumed: list[str] = []
        self.unclear: dict[str, frozenset[float]] = {}  # file -> its times that are ambiguous, and therefore refused

    def add(self, line: LogLine, reason: str) -> None:
        """Leave `line` out. Raises InvalidMessage if strict."""
        found = MalformedLine(line.file, line.number, reason)
        if self._strict:
            raise InvalidMessage(str(found), hint="repair the line, or read the log without --strict")
        self.count += 1
        if len(self.named) < MAX_NAMED_LINES:
            self.named.append(found)

    def log(self, events: Iterable[Event]) -> ReadEvents:
        """Read all `events`, then add the malformed lines and assumptions."""
        read = tuple(events)
        return ReadEvents(read, tuple(self.named), self.count, tuple(self.assumed))


def read_logs(paths: Sequence[Path | str], *, strict: bool = False) -> ReadEvents:
    """Read the events of all files, and of all `*.jsonl` in folders.

    Malformed lines are counted and named; with `strict` the first raises InvalidMessage. Raises NotFound for a missing
    file.
    """
    refusals = MalformedLines(strict=strict)
    return refusals.log(event for path in log_files(paths) for event in read_events(path, refusals))


def read_events(path: Path, refusals: MalformedLines) -> Iterator[Event]:
    """Yield a file's events as they are read, so that a caller who does not keep them can process logs of any size."""
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
    """Parse one event from one line; raises InvalidMessage with the reason."""
    event = decode(line, Event)
    if not math.isfinite(event.at):
        raise InvalidMessage("Not a valid Event: `at` is not a finite number.", hint="check the sender's clock")
    return event


def write_events(path: Path | str, events: Iterable[Event]) -> int:
    """Append events to a log, creating it if needed; returns how many."""
    count = 0
    with _open(Path(path), "ab") as file:
        for event in events:
            file.write(encode(event) + b"\n")
            count += 1
    return count


def log_files(paths: Sequence[Path | str]) -> list[Path]:
    """The files named by `paths`, each once. A folder stands for its `*.jsonl`: trainers write one per rank. Raises
    NotFound for a folder without any."""
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
    """Yield non-blank lines with their numbers. A line is cut after the longest allowed event plus one byte, which
    gets it refused."""
    with _open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_MESSAGE_BYTES + 1):
            number += 1
            _skip_rest(file, line)
            if line.strip():
                yield LogLine(str(path), number, line.rstrip(b"\r\n"))


def _skip_rest(file: IO[bytes], line: bytes) -> None:
    """Skip the rest of a line that was only read in part."""
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
