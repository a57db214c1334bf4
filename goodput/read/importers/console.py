"""Lines of a console: what colours, launchers and log collectors add to them, and when they were written. Pure."""

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
# `[rank3]:`, `[default3]:` of torchrun; `3: ` of srun --label; `worker-0 | ` of compose is none
_RANK = re.compile(r"\[(?:rank|default)(\d{1,7})\]:?|^\s*(\d{1,7}):\s")
_STAMP_WITHIN = 200  # characters: what follows is the message's own
_MAX_CHARACTERS = 4000  # of a line that can tell anything


class ConsoleLine(NamedTuple):
    """A line as the program wrote it, and who and when, as far as the line says."""

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
    """A line of a console as the program wrote it."""
    return _COLOURS.sub("", line[:_MAX_CHARACTERS].decode("utf-8", "replace")).rsplit("\r", 1)[-1]


def _said(line: bytes, clock: TimestampReader) -> ConsoleLine:
    """Its first time of day is the one it was written at."""
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
    """What `read` makes of every line; it raises Unusable for one that should mean something and does not."""
    for line, clock in clocks(lines, options.zone, refusals):
        try:
            for record in read(_said(line.data, clock)):
                yield record._replace(job=options.job, file=line.file)
        except Unusable as error:
            refusals.add(line, str(error))
