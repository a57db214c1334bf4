"""Aligns files that several nodes wrote about one run with different clocks. Pure.

The nodes of a run complete its steps together. So if two files log the same steps over the same time, the difference
between their times is the offset of their clocks. Files that follow each other, as those of consecutive runs do, are
not compared. Neither are files that overlap by no more than their apparent offset: the end of a run and the beginning
of the next overlap like that if the steps in between are recomputed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from goodput.history.values import CLOCK_SET_S
from goodput.read.importers.records import SAME_MOMENT_S, ImportedRecord, RecordKind

_LEAST_STEPS = 3  # that agree; fewer may do so by chance


class _FileSteps(NamedTuple):
    """A file, and when it logged which steps."""

    name: str
    first_at: float
    last_at: float
    steps: Mapping[tuple[RecordKind, int], Sequence[float]]  # ascending


def aligned(job: str, records: Collection[ImportedRecord], assumed: list[str]) -> Collection[ImportedRecord]:
    """The records of a job by the clock of the file with the most steps, without those of unset clocks. Notes on
    records left out or moved are added to `assumed`."""
    records = _of_set_clocks(job, records, assumed)
    if len({record.file for record in records}) < 2:
        return records
    ahead_s = _ahead_s(sorted(_file_steps(records), key=lambda file: (-len(file.steps), file.name)))
    moved = sorted((file for file in ahead_s if ahead_s[file]), key=lambda file: (-abs(ahead_s[file]), file))
    if not moved:
        return records
    by_s = ahead_s[moved[0]]
    assumed.append(
        f"Job {job}: the clock of {moved[0]} is {abs(by_s):.1f} s {'ahead' if by_s > 0 else 'behind'}, judging by the"
        f" steps that other files have, too: its times were moved{_more(moved)}."
    )
    return [record._replace(at=record.at - ahead_s.get(record.file, 0.0)) for record in records]


def _of_set_clocks(job: str, records: Collection[ImportedRecord], assumed: list[str]) -> Collection[ImportedRecord]:
    """Records of about 1970 are useless beside later ones: in order of time they would look like another run."""
    unset = sorted({record.file for record in records if record.at < CLOCK_SET_S})
    later = [record for record in records if record.at >= CLOCK_SET_S] if unset else []
    if not later:
        return records
    assumed.append(
        f"Job {job}: the clock of {unset[0]} was never set: its times of about 1970 were left out{_more(unset)}."
    )
    return later


def _more(files: Sequence[str]) -> str:
    return f", as were those of {len(files) - 1} more" if len(files) > 1 else ""


def _file_steps(records: Collection[ImportedRecord]) -> list[_FileSteps]:
    by_file: dict[str, dict[tuple[RecordKind, int], list[float]]] = {}
    for record in records:
        if record.kind in (RecordKind.STEP, RecordKind.BEGAN):
            by_file.setdefault(record.file, {}).setdefault((record.kind, record.step), []).append(record.at)
    for times in (times for steps in by_file.values() for times in steps.values()):
        times.sort()
    return [
        _FileSteps(file, min(times[0] for times in steps.values()), max(times[-1] for times in steps.values()), steps)
        for file, steps in by_file.items()
    ]


def _ahead_s(files: Sequence[_FileSteps]) -> dict[str, float]:
    """How far each file's clock is ahead of the first file's; 0.0 if they cannot be compared."""
    ahead_s: dict[str, float] = {}
    for place, file in enumerate(files):
        ahead_s[file.name] = 0.0
        for other in files[:place]:
            apart_s = _apart_s(file, other)
            if apart_s is not None:
                ahead_s[file.name] = ahead_s[other.name] + (apart_s if abs(apart_s) > SAME_MOMENT_S else 0.0)
                break
    return ahead_s


def _apart_s(file: _FileSteps, other: _FileSteps) -> float | None:
    """How far one clock is ahead of the other; None if unclear.

    Several steps must be in both files at that distance, as well as most steps of the common time span, which must be
    longer than the distance.
    """
    overlap_s = min(file.last_at, other.last_at) - max(file.first_at, other.first_at)
    if overlap_s < 0.0:
        return None
    distances = [(at, _nearest(other.steps.get(step, ()), at)) for step, times in file.steps.items() for at in times]
    within_s = [apart_s for at, apart_s in distances if other.first_at <= at <= other.last_at]
    if not within_s:
        return None
    usual_s = median_low(within_s)
    most = 2 * _agreeing(within_s, usual_s) > len(within_s)
    several = _agreeing((apart_s for _, apart_s in distances), usual_s) >= _LEAST_STEPS
    return usual_s if most and several and overlap_s > abs(usual_s) else None


def _agreeing(apart_s: Iterable[float], usual_s: float) -> int:
    return sum(abs(seconds - usual_s) <= SAME_MOMENT_S for seconds in apart_s)


def _nearest(times: Sequence[float], at: float) -> float:
    """How long `at` is after the nearest of the ascending `times`."""
    place = bisect_left(times, at)
    return min((at - other for other in times[max(0, place - 1) : place + 1]), key=abs, default=math.inf)
