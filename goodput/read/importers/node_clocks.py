"""Files of several nodes that tell of one run, by clocks that differ. Pure.

The nodes of a run complete its steps together. So where two files tell of the same steps over the same time, what lies
between their tellings is how far their clocks are apart. Files that follow each other in time, as of one run and the
next, are compared with none, nor those that overlap by no more than their clocks would be apart: the end of one run and
the beginning of the next do so where the steps between are done again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from goodput.history.values import CLOCK_SET_S
from goodput.read.importers.records import SAME_MOMENT_S, ImportedRecord, RecordKind

_LEAST_STEPS = 3  # that agree: fewer may do so by chance


class _Teller(NamedTuple):
    """A file, and when it told of which steps."""

    file: str
    first_at: float
    last_at: float
    told: Mapping[tuple[RecordKind, int], Sequence[float]]  # ascending


def aligned(job: str, records: Collection[ImportedRecord], assumed: list[str]) -> Collection[ImportedRecord]:
    """The records of a job, by the clock of the file that tells of most steps; without those of a clock that was not
    set. What was left out or moved is added to `assumed`."""
    records = _of_set_clocks(job, records, assumed)
    if len({record.file for record in records}) < 2:
        return records
    ahead_s = _ahead_s(sorted(_tellers(records), key=lambda teller: (-len(teller.told), teller.file)))
    moved = sorted((file for file in ahead_s if ahead_s[file]), key=lambda file: (-abs(ahead_s[file]), file))
    if not moved:
        return records
    by_s = ahead_s[moved[0]]
    assumed.append(
        f"Job {job}: the clock of {moved[0]} is {abs(by_s):.1f} s {'ahead' if by_s > 0 else 'behind'}, by the steps"
        f" that other files tell of too: its times were moved{_more(moved)}."
    )
    return [record._replace(at=record.at - ahead_s.get(record.file, 0.0)) for record in records]


def _of_set_clocks(job: str, records: Collection[ImportedRecord], assumed: list[str]) -> Collection[ImportedRecord]:
    """Beside later ones, records of about 1970 tell nothing: in the order of time they would be another run."""
    unset = sorted({record.file for record in records if record.at < CLOCK_SET_S})
    later = [record for record in records if record.at >= CLOCK_SET_S] if unset else []
    if not later:
        return records
    assumed.append(
        f"Job {job}: the clock of {unset[0]} was not set: its times of about 1970 were left out{_more(unset)}."
    )
    return later


def _more(files: Sequence[str]) -> str:
    return f", as were those of {len(files) - 1} more" if len(files) > 1 else ""


def _tellers(records: Collection[ImportedRecord]) -> list[_Teller]:
    told: dict[str, dict[tuple[RecordKind, int], list[float]]] = {}
    for record in records:
        if record.kind in (RecordKind.STEP, RecordKind.BEGAN):
            told.setdefault(record.file, {}).setdefault((record.kind, record.step), []).append(record.at)
    for times in (times for steps in told.values() for times in steps.values()):
        times.sort()
    return [
        _Teller(file, min(times[0] for times in steps.values()), max(times[-1] for times in steps.values()), steps)
        for file, steps in told.items()
    ]


def _ahead_s(tellers: Sequence[_Teller]) -> dict[str, float]:
    """How far the clock of each file is ahead of that of the first, as far as they can be compared."""
    ahead_s: dict[str, float] = {}
    for place, teller in enumerate(tellers):
        ahead_s[teller.file] = 0.0
        for other in tellers[:place]:
            apart_s = _apart_s(teller, other)
            if apart_s is not None:
                ahead_s[teller.file] = ahead_s[other.file] + (apart_s if abs(apart_s) > SAME_MOMENT_S else 0.0)
                break
    return ahead_s


def _apart_s(teller: _Teller, other: _Teller) -> float | None:
    """How far one clock is ahead of the other; None unless several steps were told of by both that far apart, and most
    that were told of in the other's time, over a longer time than that."""
    overlap_s = min(teller.last_at, other.last_at) - max(teller.first_at, other.first_at)
    if overlap_s < 0.0:
        return None
    told = [(at, _nearest(other.told.get(step, ()), at)) for step, times in teller.told.items() for at in times]
    within_s = [apart_s for at, apart_s in told if other.first_at <= at <= other.last_at]
    if not within_s:
        return None
    usual_s = median_low(within_s)
    most = 2 * _agreeing(within_s, usual_s) > len(within_s)
    several = _agreeing((apart_s for _, apart_s in told), usual_s) >= _LEAST_STEPS
    return usual_s if most and several and overlap_s > abs(usual_s) else None


def _agreeing(apart_s: Iterable[float], usual_s: float) -> int:
    return sum(abs(seconds - usual_s) <= SAME_MOMENT_S for seconds in apart_s)


def _nearest(times: Sequence[float], at: float) -> float:
    """How long `at` is after the nearest of `times`, which ascend."""
    place = bisect_left(times, at)
    return min((at - told for told in times[max(0, place - 1) : place + 1]), key=abs, default=math.inf)
