"""Turns overlapping spans into intervals that do not overlap. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from goodput.account.categories import Category


class Interval(NamedTuple):
    """A piece of the elapsed time: wall clock, start < end."""

    start: float
    end: float
    category: Category
    incident_id: str  # '' if no incident is the cause
    host_id: str = ""  # the host that was waited for, if no incident is the cause and the log has it

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Layer(IntEnum):
    BASE = 0
    STEP = 1
    STRAGGLER = 2
    DATA = 3
    BLOCKED = 4
    EVALUATION = 5
    SETTLED = 6


class Span(NamedTuple):
    """A claim on a part of the time. Where spans overlap the higher layer wins; within a layer, the later start."""

    layer: Layer
    start: float
    end: float
    category: Category
    incident_id: str = ""
    host_id: str = ""


_NOTHING = (Category.UNKNOWN, "", "")


def sweep(spans: Iterable[Span], start: float, end: float) -> Iterator[Interval]:
    """The highest span of every piece of [start, end]; equal neighbours are joined."""
    clipped = sorted((max(s.start, start), min(s.end, end), s) for s in spans if max(s.start, start) < min(s.end, end))
    cuts = sorted({start, end, *(c[0] for c in clipped), *(c[1] for c in clipped)})
    active: list[tuple[int, float, float, tuple[Category, str, str]]] = []  # highest first
    since, kind = start, _NOTHING  # of the interval being joined
    coming = 0
    for left in cuts[:-1]:
        while coming < len(clipped) and clipped[coming][0] <= left:
            _, until, span = clipped[coming]
            heapq.heappush(active, (-span.layer, -span.start, until, span[3:]))
            coming += 1
        while active and active[0][2] <= left:
            heapq.heappop(active)
        found = active[0][3] if active else _NOTHING
        if found != kind:
            if since < left:
                yield Interval(since, left, *kind)
            since, kind = left, found
    if since < end:
        yield Interval(since, end, *kind)
