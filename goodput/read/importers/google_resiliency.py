"""The event log of Google's resiliency library (AI-Hypercomputer/resiliency, `goodput_measure`).

One JSON object per line, keys in any order: `timestamp` (ISO 8601, of the node's local clock and without an offset),
`job_name`, `event_type`, and as it applies `node_rank` and `step`, which may be floats. Every node tells of its starts
and ends; a node that is killed does not. Steps show only in `checkpoint_loaded` and `checkpoint_saved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC

from goodput.account.google_resiliency import Entry, EntryKind
from goodput.history.values import MOST_STEPS
from goodput.read.event_files import Line, Refusals
from goodput.read.importers.json_entries import entry_of, has_any, name_in
from goodput.read.importers.options import Options
from goodput.read.importers.records import UNKNOWN_STEP, Kind, Record, Unusable, step_of
from goodput.read.importers.times import Clock, clocks

_KINDS: Mapping[str, Kind] = {
    EntryKind.USER_SCHEDULED: Kind.SUBMITTED,
    EntryKind.JOB_STARTED: Kind.STARTED,
    EntryKind.CHECKPOINT_LOADED: Kind.LOADED,
    EntryKind.CHECKPOINT_SAVED: Kind.SAVED,
    EntryKind.JOB_TERMINATED: Kind.STOPPED,
    EntryKind.USER_TERMINATED: Kind.ENDED,
}


def recognises(line: bytes) -> bool:
    return has_any(line, ("event_type",)) and b'"timestamp"' in line


def records(lines: Iterable[Line], refusals: Refusals, options: Options) -> Iterator[Record]:
    """The records of all entries of the types that are known."""
    for line, clock in clocks(lines, options.zone, refusals):
        try:
            record = _record(entry_of(line.data), clock)
        except Unusable as error:
            refusals.add(line, str(error))
        else:
            yield record._replace(job=record.job or options.job, file=line.file)


def entries(lines: Iterable[Line], refusals: Refusals) -> Iterator[Entry]:
    """What the lines say, as they say it, for Google's own formula; refused are those that its calculator stops at, and
    steps too large to be any."""
    for line in lines:
        try:
            yield _entry(entry_of(line.data))
        except Unusable as error:
            refusals.add(line, str(error))


def _record(fields: Mapping[str, object], clock: Clock) -> Record:
    """To load step 0 is to start from scratch: steps count from 1."""
    name = name_in(fields, "event_type")
    kind = _KINDS.get(name)
    if kind is None:
        raise Unusable(f"event_type {name[:40]!r} is not one of {', '.join(_KINDS)}")
    at = clock.from_stamp(name_in(fields, "timestamp"))
    step, rank = (step_of(0 if (value := fields.get(key)) is None else value) for key in ("step", "node_rank"))
    if kind is Kind.LOADED and step == 0:
        kind = Kind.READY
    return Record(
        at,
        kind,
        step if kind in (Kind.LOADED, Kind.READY, Kind.SAVED) else UNKNOWN_STEP,
        rank if kind is Kind.STARTED else 0,
        {Kind.STARTED: str(rank), Kind.ENDED: "stopped"}.get(kind, ""),
        job=name_in(fields, "job_name"),
    )


def _entry(fields: Mapping[str, object]) -> Entry:
    timestamp, event_type = name_in(fields, "timestamp"), name_in(fields, "event_type")
    Clock(UTC).from_stamp(timestamp)
    if not event_type:
        raise Unusable("an entry without `event_type`")
    step = fields.get("step", 0)
    if not isinstance(step, int | float):
        step = None
    elif not abs(step) <= MOST_STEPS:
        raise Unusable(f"a `step` beyond {MOST_STEPS} is none")
    return Entry(timestamp, event_type, step, name_in(fields, "job_name"))
