"""The console log of NVIDIA NeMo 2: a line per step, or per `log_every_n_steps`, without a time of its own.

    Training epoch 0, iteration 97/99 | lr: 1.5e-05 | global_step: 97 | train_step_timing in s: 12.22

Its lines need a time prefix from the collector (`kubectl logs --timestamps`, `ts`). Steps count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.console import ConsoleLine, records_of, text_of
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import ImportedRecord, RecordKind, Unusable, number_in, step_of

_ITERATION = re.compile(r"\bTraining epoch \d+, iteration (\d{1,16})/\d+ \|")
_GLOBAL_STEP = re.compile(r"\| global_step: (\d{1,16})\b")
_STEP_S = re.compile(r"\| train_step_timing in s: ([\d.eE+-]+)")


def recognises(line: bytes) -> bool:
    return _ITERATION.search(text_of(line)) is not None


def records(lines: Iterable[LogLine], refusals: MalformedLines, options: ImportOptions) -> Iterator[ImportedRecord]:
    """Yield the records of all lines about training; others are ignored."""
    return records_of(lines, refusals, options, _read)


def _read(line: ConsoleLine) -> Iterator[ImportedRecord]:
    if found := _ITERATION.search(line.text):
        step = _GLOBAL_STEP.search(line.text) or found  # iterations start over with each epoch
        timing = _STEP_S.search(line.text)
        seconds = number_in(timing[1]) if timing else 0.0
        if seconds < 0:
            raise Unusable(f"a step of {seconds} s")
        yield ImportedRecord(line.at(), RecordKind.STEP, step_of(int(step[1])), line.rank, seconds=seconds)
