"""The formats of event logs that goodput reads, and their detection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from flyball.contracts.errors import UsageError
from flyball.contracts.events import Event
from goodput.account.google_resiliency import LogEntry
from goodput.read.event_files import LogLine, MalformedLines, ReadEvents, log_files, read_events, read_lines
from goodput.read.importers import csv_table, google_resiliency, megatron, ml_goodput, nemo, torchtitan
from goodput.read.importers.assembly import events_of
from goodput.read.importers.options import ImportOptions, options
from goodput.read.importers.records import ImportedRecord

AUTO = "auto"
FLYBALL = "flyball"
# A console log may be long before its first iteration.
_LINES_TO_LOOK_AT = 100_000


class Importer(NamedTuple):
    """One foreign format.

    `records` handles each line on its own, except for a header and the clock (`importers.times`). It refuses relevant
    lines that are malformed, and ignores others.
    """

    recognises: Callable[[bytes], bool]
    records: Callable[[Iterable[LogLine], MalformedLines, ImportOptions], Iterator[ImportedRecord]]
    saves_are_steps: bool = False


# In the order in which they are tried.
IMPORTERS: Mapping[str, Importer] = {
    "google-resiliency": Importer(google_resiliency.recognises, google_resiliency.records, saves_are_steps=True),
    "ml-goodput": Importer(ml_goodput.recognises, ml_goodput.records),
    "torchtitan": Importer(torchtitan.recognises, torchtitan.records),
    "nemo": Importer(nemo.recognises, nemo.records),
    "megatron": Importer(megatron.recognises, megatron.records),
    "csv": Importer(csv_table.recognises, csv_table.records),
}
FORMATS = (AUTO, FLYBALL, *IMPORTERS)


def read(
    paths: Sequence[Path | str],
    *,
    format: str = AUTO,
    strict: bool = False,
    mapping: Mapping[str, str] | None = None,
) -> ReadEvents:
    """Read the events of all files, in any order. A folder stands for its `*.jsonl`; a file named twice is read once.

    `format` is one of FORMATS; with `auto` each file may have a different one. `mapping` is the result of
    `parse_mapping` on `--map` (docs/reference/goodput/importers.md). Malformed lines are counted and named; with
    `strict` the first raises InvalidMessage. Raises UsageError for an unknown format, an invalid map or an unrecognised
    file, NotFound for a missing file, ConfigurationError for an unreadable one.
    """
    refusals = MalformedLines(strict=strict)
    return refusals.log(stream(paths, refusals, format=format, mapping=mapping))


def stream(
    paths: Sequence[Path | str],
    refusals: MalformedLines,
    *,
    format: str = AUTO,
    mapping: Mapping[str, str] | None = None,
) -> Iterator[Event]:
    """Like `read`, but yields one event at a time and keeps none, so logs may have any size. `refusals` is complete
    after the last event."""
    if format not in FORMATS:
        raise UsageError(f"There is no log format {format!r}.", hint=f"use one of {', '.join(FORMATS)}")
    files = log_files(paths)
    by_format: dict[str, list[Path]] = {}
    for path, name in _formats(files, mapping) if format == AUTO else ((path, format) for path in files):
        by_format.setdefault(name, []).append(path)
    return chain.from_iterable(_events(name, files, refusals, mapping) for name, files in by_format.items())


def read_entries(paths: Sequence[Path | str], refusals: MalformedLines) -> Iterator[LogEntry]:
    """Yield the entries of all files, for the formula of Google's resiliency library (`account.google_resiliency`).

    Raises the same errors as `read`. `refusals` is complete after the last entry.
    """
    return google_resiliency.entries(chain.from_iterable(map(read_lines, log_files(paths))), refusals)


def _formats(paths: Sequence[Path], mapping: Mapping[str, str] | None) -> Iterator[tuple[Path, str]]:
    """Every file with its format. An unrecognised file, like the last part of a split log, gets the format of the
    others if they have only one."""
    found = [(path, *detect(path, mapping)) for path in paths]
    known = {name for _, name, _ in found if name}
    for path, name, looked_at in found:
        if not name and looked_at and len(known) != 1:
            raise UsageError(
                f"None of the first {looked_at} lines of {path} has a known log format.",
                hint=f"name it with --format: {', '.join(FORMATS[1:])}; a console log needs a time on every line",
            )
        yield path, name or next(iter(known), FLYBALL)


def detect(path: Path, mapping: Mapping[str, str] | None = None) -> tuple[str, int]:
    """The format of a file ('' if unknown), and the number of the last line examined.

    The first line recognised by any format decides; a file is CSV if its name or a map of columns says so.
    """
    if path.suffix.lower() in (".csv", ".tsv") or options(mapping, job="").columns:
        return "csv", 0
    number = 0
    for line in islice(read_lines(path), _LINES_TO_LOOK_AT):
        number = line.number
        if _is_event(line.data):
            return FLYBALL, number
        for name, importer in IMPORTERS.items():
            if importer.recognises(line.data):
                return name, number
    return "", number


def _events(
    name: str, files: Sequence[Path], refusals: MalformedLines, mapping: Mapping[str, str] | None
) -> Iterator[Event]:
    if name == FLYBALL:
        for path in files:
            yield from read_events(path, refusals)
        return
    lines = chain.from_iterable(map(read_lines, files))
    importer = IMPORTERS[name]
    records = importer.records(lines, refusals, options(mapping, job=name))
    yield from events_of(records, refusals, saves_are_steps=importer.saves_are_steps)


def _is_event(line: bytes) -> bool:
    return line.lstrip().startswith(b"{") and b'"at"' in line and b'"kind"' in line
