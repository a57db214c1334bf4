"""A table of steps as CSV with a header; `--map at=time,step=iteration` names the columns. Pure.

A row is a step and its completion time. More columns may hold the rank, the step's duration and the job. Columns not in
the map are found by the names that trackers export.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import ImportedRecord, RecordKind, Unusable, number_in, seconds_of, step_of
from goodput.read.importers.times import TimestampReader, clocks, from_number, scale_of

_USUAL_NAMES = {
    "at": ("at", "time", "timestamp", "_timestamp", "wall time", "wall_time", "datetime"),
    "step": ("step", "_step", "global_step", "iteration", "iter"),
    "rank": ("rank",),
}
_NEEDED = {"at", "step"}


def recognises(line: bytes) -> bool:
    """Whether the line is a header with columns of the usual names."""
    try:
        return set(_columns(_fields(line, ","), {})) >= _NEEDED
    except Unusable:
        return False


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield a record per row. A file without a header uses the header of the previous file."""
    columns: Mapping[str, int] = {}
    file = ""
    for line, clock in clocks(lines, options.zone, refusals):
        try:
            fields = _fields(line.data, options.delimiter)
            if line.file != file:
                file = line.file
                found = _columns(fields, options.columns)
                if set(found) >= _NEEDED:
                    columns = found
                    continue
            if not columns:
                named = " and ".join(options.columns.get(key, key) for key in sorted(_NEEDED))
                raise Unusable(f"no header with the columns {named} before it: name yours with --map at=...,step=...")
            yield _record(fields, columns, options, clock)._replace(file=line.file)
        except Unusable as error:
            refusals.add(line, str(error))


def _record(
    fields: Sequence[str], columns: Mapping[str, int], options: ImportOptions, clock: TimestampReader
) -> ImportedRecord:
    values = {key: fields[place].strip() for key, place in columns.items() if place < len(fields)}
    if missing := sorted(_NEEDED - set(values)):
        raise Unusable(f"a row of {len(fields)} columns has none for `{missing[0]}`")
    seconds = values.get("step_s", "")
    return ImportedRecord(
        at=_moment(values["at"], options, clock),
        kind=RecordKind.STEP,
        step=step_of(number_in(values["step"])),
        rank=step_of(number_in(values["rank"])) if "rank" in values else 0,
        seconds=seconds_of(number_in(seconds, scale_of(options.step_s_unit))) if seconds else 0.0,
        job=values.get("job_column", options.job),
    )


def _moment(text: str, options: ImportOptions, clock: TimestampReader) -> float:
    if options.at_format:
        return clock.from_format(text, options.at_format)
    if text[4:5] == "-":
        return clock.from_stamp(text)
    return from_number(text, options.at_unit)


def _fields(line: bytes, delimiter: str) -> list[str]:
    """The fields of a row. Rows that continue on the next line are not supported: this is a table of numbers."""
    try:
        rows = list(csv.reader([line.decode("utf-8-sig", "replace")], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise Unusable(f"not a row of CSV: {error}") from None
    return rows[0] if rows else []


def _columns(names: Sequence[str], chosen: Mapping[str, str]) -> dict[str, int]:
    """Key -> index of its column, for the columns that the header has."""
    places: dict[str, int] = {}
    lowered = {name.strip().lower(): place for place, name in reversed(list(enumerate(names)))}
    for key, name in chosen.items():
        if name in names:
            places[key] = names.index(name)
    for key, usual in _USUAL_NAMES.items():
        if key not in chosen:
            place = next((lowered[name] for name in usual if name in lowered), None)
            if place is not None:
                places[key] = place
    return places
