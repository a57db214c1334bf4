"""The event log of Google's resiliency library (AI-Hypercomputer/resiliency, `goodput_measure`).

One JSON object per line, keys in any order: `timestamp` (ISO 8601, the node's local time without an offset),
`job_name`, `event_type`, and if applicable `node_rank` and `step`, which may be floats. Every node logs its starts and
ends, but not when it is killed. Steps appear only in `checkpoint_loaded` and `checkpoint_saved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC

from goodput.account.google_resiliency import EntryKind, LogEntry
from goodput.history.values import MOST_STEPS
from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.json_entries import entry_of, has_any, name_in
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import UNKNOWN_STEP, ImportedRecord, RecordKind, Unusable, step_of
from goodput.read.importers.times import TimestampReader, clocks

_KINDS: Mapping[str, RecordKind] = {
    EntryKind.USER_SCHEDULED: RecordKind.SUBMITTED,
    EntryKind.JOB_STARTED: RecordKind.STARTED,
    EntryKind.CHECKPOINT_LOADED: RecordKind.LOADED,
    EntryKind.CHECKPOINT_SAVED: RecordKind.SAVED,
    EntryKind.JOB_TERMINATED: RecordKind.STOPPED,
    EntryKind.USER_TERMINATED: RecordKind.ENDED,
}


def recognises(line: bytes) -> bool:
    return has_any(line, ("event_type",)) and b'"timestamp"' in line


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield the records of all entries of known types."""
    for line, clock in clocks(lines, options.zone, refusals):
        try:
            record = _record(entry_of(line.data), clock)
        except Unusable as error:
            refusals.add(line, str(error))
        else:
            yield record._replace(job=record.job or options.job, file=line.file)


def entries(lines: Iterable[LogLine], refusals: MalformedLines) -> Iterator[LogEntry]:
    """Yield the entries unchanged, for Google's own formula. Refuses entries that its calculator would stop at, and
    impossibly large steps."""
    for line in lines:
        try:
            yield _entry(entry_of(line.data))
        except Unusable as error:
            refusals.add(line, str(error))


def _record(fields: Mapping[str, object], clock: TimestampReader) -> ImportedRecord:
    """Parse an entry. Loading step 0 means starting from scratch: steps count from 1."""
    name = name_in(fields, "event_type")
    kind = _KINDS.get(name)
    if kind is None:
        raise Unusable(f"event_type {name[:40]!r} is not one of {', '.join(_KINDS)}")
    at = clock.from_stamp(name_in(fields, "timestamp"))
    step, rank = (step_of(0 if (value := fields.get(key)) is None else value) for key in ("step", "node_rank"))
    if kind is RecordKind.LOADED and step == 0:
        kind = RecordKind.READY
    return ImportedRecord(
        at,
        kind,
        step if kind in (RecordKind.LOADED, RecordKind.READY, RecordKind.SAVED) else UNKNOWN_STEP,
        rank if kind is RecordKind.STARTED else 0,
        {RecordKind.STARTED: str(rank), RecordKind.ENDED: "stopped"}.get(kind, ""),
        job=name_in(fields, "job_name"),
    )


def _entry(fields: Mapping[str, object]) -> LogEntry:
    timestamp, event_type = name_in(fields, "timestamp"), name_in(fields, "event_type")
    TimestampReader(UTC).from_stamp(timestamp)
    if not event_type:
        raise Unusable("an entry without `event_type`")
    step = fields.get("step", 0)
    if not isinstance(step, int | float):
        step = None
    elif not abs(step) <= MOST_STEPS:
        raise Unusable(f"a `step` beyond {MOST_STEPS} is not valid")
    return LogEntry(timestamp, event_type, step, name_in(fields, "job_name"))
