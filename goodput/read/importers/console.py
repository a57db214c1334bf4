"""Parses console lines: removes colours and prefixes of launchers and log collectors, and finds rank and time. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from goodput.read.event_files import LogLine, MalformedLines
from goodput.read.importers.options import ImportOptions
from goodput.read.importers.records import ImportedRecord, Unusable
from goodput.read.importers.times import STAMP, TimestampReader, clocks

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_STAMP = re.compile(STAMP)
# `[rank3]:`, `[default3]:` of torchrun; `3: ` of srun --label. `worker-0 | ` of compose does not count
_RANK = re.compile(r"\[(?:rank|default)(\d{1,7})\]:?|^\s*(\d{1,7}):\s")
_STAMP_WITHIN = 200  # characters: later ones are part of the message
_MAX_CHARACTERS = 4000  # of a line that are parsed


class ConsoleLine(NamedTuple):
    """A line as the program wrote it, with its rank and time if the line has them."""

    text: str
    rank: int
    stamp: str | None
    clock: TimestampReader

    def at(self) -> float:
        """When it was written. Raises Unusable for a line without a time."""
        if self.stamp is None:
            raise Unusable(
                "no time on this line: collect the log with times (`kubectl logs --timestamps`, `2>&1 | ts '%FT%T%z'`)"
            )
        return self.clock.from_stamp(self.stamp)


def text_of(line: bytes) -> str:
    """A console line as the program wrote it."""
    return _COLOURS.sub("", line[:_MAX_CHARACTERS].decode("utf-8", "replace")).rsplit("\r", 1)[-1]


def _parsed(line: bytes, clock: TimestampReader) -> ConsoleLine:
    """Parse a line. The first time in it is taken for its time of writing."""
    text = text_of(line)
    head = text[:_STAMP_WITHIN]
    rank = _RANK.search(head)
    stamp = _STAMP.search(head)
    return ConsoleLine(
        text,
        int(next(group for group in rank.groups() if group is not None)) if rank else 0,
        stamp.group() if stamp else None,
        clock,
    )


def records_of(
    lines: Iterable[LogLine],
    refusals: MalformedLines,
    options: ImportOptions,
    read: Callable[[ConsoleLine], Iterator[ImportedRecord]],
) -> Iterator[ImportedRecord]:
    """Apply `read` to every line. It raises Unusable for a relevant line that is malformed."""
    for line, clock in clocks(lines, options.zone, refusals):
        try:
            for record in read(_parsed(line.data, clock)):
                yield record._replace(job=options.job, file=line.file)
        except Unusable as error:
            refusals.add(line, str(error))
