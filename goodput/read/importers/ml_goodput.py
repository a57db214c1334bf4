"""The log entries of ml-goodput-measurement (AI-Hypercomputer/ml-goodput-measurement), one JSON object per line.

An entry has `job_name` and one time, in seconds since 1970: `job_start_time`, `job_end_time`, `step_start_time` with
`step_count`, or the start or end of `tpu_init`, `training_prep`, `data_loading` or a custom event. A job starts once
per restart. Only the start of a step is logged: a step is complete when the next one begins, and the end of the last is
unknown. Entries of its checkpoint logger have the `event_type` `save` or `restore`, with starts and durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.json_entries import entry_of, has_any, name_in
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import ImportedRecord, RecordKind, Unusable, moment_of, seconds_of, step_of

_STEP_START = "step_start_time"
# Starts and ends are separate entries; each means that the rank entered a phase.
_ENTERS = {
    "tpu_init_start_time": "init",
    "tpu_init_end_time": "init",
    "training_prep_start_time": "init",
    "training_prep_end_time": "step",
    "data_loading_start_time": "data",
    "data_loading_end_time": "step",
    "custom_badput_event_start_time": "other",
    "custom_badput_event_end_time": "step",
}
_MOMENTS = ("job_start_time", "job_end_time", _STEP_START, *_ENTERS)
_SAVE, _RESTORE = "checkpoint_manager_blocking", "checkpoint_manager"


def recognises(line: bytes) -> bool:
    return has_any(line, (*_MOMENTS, f"{_SAVE}_start_time", f"{_RESTORE}_start_time"))


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield the records of all entries."""
    for line in lines:
        try:
            entry = entry_of(line.data)
            job = name_in(entry, "job_name") or options.job
            for record in _records(entry):
                yield record._replace(job=job, file=line.file)
        except Unusable as error:
            refusals.add(line, str(error))


def _records(entry: Mapping[str, object]) -> Iterator[ImportedRecord]:
    if "event_type" in entry:
        yield from _checkpoint_records(entry)
        return
    found = [key for key in _MOMENTS if entry.get(key) is not None]
    if not found:
        raise Unusable(f"an entry without any of {', '.join(_MOMENTS)}")
    for key in found:
        at = moment_of(entry[key])
        if key == "job_start_time":
            yield ImportedRecord(at, RecordKind.STARTED)
        elif key == "job_end_time":
            yield ImportedRecord(at, RecordKind.ENDED, label="succeeded")
        elif key == _STEP_START:
            yield ImportedRecord(at, RecordKind.BEGAN, step_of(entry.get("step_count")))
        else:
            yield ImportedRecord(at, RecordKind.ENTERED, label=_ENTERS[key])


def _checkpoint_records(entry: Mapping[str, object]) -> Iterator[ImportedRecord]:
    """The blocking part of a save, or a restore."""
    what = name_in(entry, "event_type")
    step = step_of(entry.get("step"))
    if what == "save":
        seconds = seconds_of(entry.get(f"{_SAVE}_duration_secs") or 0.0)
        at = moment_of(entry.get(f"{_SAVE}_start_time")) + seconds
        yield ImportedRecord(at, RecordKind.SAVED, step, label=name_in(entry, "directory")[:200])
        if seconds > 0:
            yield ImportedRecord(at, RecordKind.PHASE, label="checkpoint", seconds=seconds)
    elif what == "restore":
        seconds = seconds_of(entry.get(f"{_RESTORE}_duration_secs") or 0.0)
        at = moment_of(entry.get(f"{_RESTORE}_start_time")) + seconds
        yield ImportedRecord(at, RecordKind.LOADED, step)
        if seconds > 0:
            yield ImportedRecord(at, RecordKind.PHASE, label="restore", seconds=seconds)
    else:
        raise Unusable(f"event_type {what[:40]!r} is neither save nor restore")
