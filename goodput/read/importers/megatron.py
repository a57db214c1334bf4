"""The console log of Megatron-LM: a line per `--log-interval` iterations, from the last rank.

     [2026-01-29 10:15:45] iteration       10/    1000 | elapsed time per iteration (ms): 1234.5 | lm loss: 5.1E+00 |

Some forks write `current time: 1706860208.35`, which takes precedence over the time in brackets; older versions write
neither and need a collector's times. `[after megatron is initialized] datetime: ...` marks a start, `[before the start
of training step]` the beginning of the loop, `[after training is done]` the end. The elapsed time is the mean since the
previous line, without evaluations and saves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.console import ConsoleLine, records_of, text_of
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import (
    UNKNOWN_STEP,
    ImportedRecord,
    RecordKind,
    Unusable,
    moment_of,
    number_in,
    step_of,
)
from goodput.read.importers.times import STAMP

_ITERATION = re.compile(r"\biteration\s+(\d{1,16})/\s*\d+ \|")
_ELAPSED_MS = re.compile(r"\| elapsed time per iteration \(ms\): ([\d.]+)")
_CURRENT_TIME = re.compile(r"\| current time: ([\d.]+)")
_MOMENT = re.compile(
    rf"\[(after megatron is initialized|before the start of training step|after training is done)\]"
    rf"\s*datetime: ({STAMP})"
)
_LOADED = re.compile(r"\bsuccessfully loaded checkpoint from .* at iteration\s+(\d{1,16})\b")
_SAVED = re.compile(r"\bsuccessfully saved checkpoint (?:from|at) iteration\s+(\d{1,16})\b")


def recognises(line: bytes) -> bool:
    text = text_of(line)
    return _MOMENT.search(text) is not None or bool(_ITERATION.search(text) and _ELAPSED_MS.search(text))


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield the records of all lines about training; others are ignored."""
    return records_of(lines, refusals, options, _read)


def _read(line: ConsoleLine) -> Iterator[ImportedRecord]:
    if found := _ITERATION.search(line.text):
        yield _iteration(line, step_of(int(found[1])))
    elif found := _MOMENT.search(line.text):
        at = line.clock.from_stamp(found[2])
        if found[1].startswith("before"):
            yield ImportedRecord(at, RecordKind.READY, UNKNOWN_STEP, line.rank)
        elif found[1] == "after training is done":
            yield ImportedRecord(at, RecordKind.ENDED, label="succeeded")
        else:
            yield ImportedRecord(at, RecordKind.STARTED, rank=line.rank, label=str(line.rank))
    elif line.stamp is not None and (found := _LOADED.search(line.text)):
        yield ImportedRecord(line.at(), RecordKind.LOADED, step_of(int(found[1])) or -1, line.rank)
    elif line.stamp is not None and (found := _SAVED.search(line.text)):
        yield ImportedRecord(line.at(), RecordKind.SAVED, step_of(int(found[1])), line.rank)


def _iteration(line: ConsoleLine, step: int) -> ImportedRecord:
    elapsed = _ELAPSED_MS.search(line.text)
    if elapsed is None:
        raise Unusable("an iteration without `elapsed time per iteration (ms)`")
    current = _CURRENT_TIME.search(line.text)
    at = line.at() if current is None else moment_of(number_in(current[1]))
    return ImportedRecord(at, RecordKind.STEP, step, line.rank, seconds=number_in(elapsed[1], 1e-3))
