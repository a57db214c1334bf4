"""The console log of torchtitan (pytorch/torchtitan): a time on every line, and a line per `log_freq` steps.

    [rank0]:[titan] 2026-01-29 10:15:45,267 - root - INFO - step: 10  loss:  9.3421  memory: 48.91GiB(51.52%)

It also logs the program's start, the loop's beginning and its first step, the durations of saves and loads, and the
completion of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.console import ConsoleLine, records_of, text_of
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import ImportedRecord, RecordKind, number_in, step_of

_LOGGED = r" - (?:INFO|WARNING) - "
_STEP = re.compile(_LOGGED + r"step:\s*(\d{1,16})(?:/\d+)?(?:\s*=\s*[\d.]+%)?\s+loss:")
_STARTS = re.compile(_LOGGED + r"Starting job\b")
_READY = re.compile(_LOGGED + r"Training starts at step[ :]+(\d{1,16})")
_LOADED = re.compile(_LOGGED + r"Finished loading the checkpoint\b.*?\bin ([\d.]+) seconds")
_SAVED = re.compile(_LOGGED + r"Finished saving the checkpoint\b.*?\bin ([\d.]+) seconds")
_ENDED = re.compile(_LOGGED + r"Training completed\b")


def recognises(line: bytes) -> bool:
    text = text_of(line)
    return any(pattern.search(text) for pattern in (_STEP, _READY))


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield the records of all lines about training; others are ignored."""
    return records_of(lines, refusals, options, _read)


def _read(line: ConsoleLine) -> Iterator[ImportedRecord]:
    if found := _STEP.search(line.text):
        yield ImportedRecord(line.at(), RecordKind.STEP, step_of(int(found[1])), line.rank)
    elif _STARTS.search(line.text):
        yield ImportedRecord(line.at(), RecordKind.STARTED, rank=line.rank, label=str(line.rank))
    elif found := _READY.search(line.text):
        yield ImportedRecord(line.at(), RecordKind.READY, step_of(int(found[1])) - 1, line.rank)
    elif found := _LOADED.search(line.text):
        yield ImportedRecord(line.at(), RecordKind.PHASE, rank=line.rank, label="restore", seconds=number_in(found[1]))
    elif found := _SAVED.search(line.text):
        yield ImportedRecord(
            line.at(), RecordKind.PHASE, rank=line.rank, label="checkpoint", seconds=number_in(found[1])
        )
    elif _ENDED.search(line.text):
        yield ImportedRecord(line.at(), RecordKind.ENDED, label="succeeded")
