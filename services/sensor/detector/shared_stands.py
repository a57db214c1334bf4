"""What a sensor tells the others about ranks that stand still, so that each sees all ranks of a job that hangs. Pure.

A sensor tells only of jobs of which some ranks report elsewhere, and only while none of its own ranks works: a healthy
job costs nothing. Ranks that do the same are one group with spans of rank numbers, so that a job of any size fits. The
ages of a group are those of its youngest rank, and do not grow on the way: a rank is overdue only by what its own
sensor saw.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

import msgspec

from flyball.contracts.cluster import Activity, Phase
from flyball.contracts.reports.rank_columns import RankProgress, phases_of
from services.sensor.detector.watched_ranks import WatchedRanks

MAX_GROUPS = 64  # per job; ranks of a job that hangs do few different things
MAX_SPANS = 4_096  # per job
STANDING = (Activity.IDLE, Activity.BLOCKED, Activity.STOPPED, Activity.TRACED, Activity.READS_INPUT)

Span: TypeAlias = tuple[int, int]  # first and last rank


class StandingRanks(msgspec.Struct, frozen=True):
    """Ranks at one step that do the same. Ages are those of the youngest."""

    spans: tuple[Span, ...]
    phase: Phase
    step: int
    activity: Activity
    place: str
    has_stepped: bool
    age_s: float  # since its beacon moved
    activity_s: float  # since it began to do that


class JobStand(msgspec.Struct, frozen=True):
    """A sensor's own ranks of a job's newest generation, all of which stand still."""

    job: str
    generation: int
    groups: tuple[StandingRanks, ...]


class Elsewhere(msgspec.Struct, frozen=True):
    """Ranks as another sensor sees them, in columns."""

    numbers: tuple[int, ...]
    progress: RankProgress
    has_stepped: tuple[bool, ...]


def stand_of(job: str, generation: int, hosts: Iterable[WatchedRanks]) -> JobStand | None:
    """Sum up the ranks of these hosts; None if they do too many different things."""
    found: dict[tuple[Phase, int, Activity, str, bool], tuple[list[int], float, float]] = {}
    for ranks in hosts:
        progress, count = ranks.progress, len(ranks.numbers)
        columns = zip(
            ranks.numbers,
            phases_of(progress),
            progress.steps,
            ranks.doing,
            ranks.has_stepped,
            (age_s - late_s for age_s, late_s in zip(progress.beacon_ages_s, ranks.forgiven_s, strict=True)),
            progress.activities_s or (0.0,) * count,
            strict=True,
        )
        for number, phase, step, (activity, place), has_stepped, age_s, activity_s in columns:
            key = (phase, step, activity, place, has_stepped)
            numbers, least_age_s, least_s = found.get(key, ([], age_s, activity_s))
            numbers.append(number)
            found[key] = numbers, min(age_s, least_age_s), min(activity_s, least_s)
    groups = tuple(
        StandingRanks(_spans(numbers), *key, max(0.0, age_s), activity_s)
        for key, (numbers, age_s, activity_s) in sorted(found.items(), key=lambda item: min(item[1][0]))
    )
    if not groups or len(groups) > MAX_GROUPS or sum(len(group.spans) for group in groups) > MAX_SPANS:
        return None
    return JobStand(job, generation, groups)


def columns_of(stand: JobStand, wanted: Collection[int]) -> Elsewhere | None:
    """The columns of the wanted ranks among these, by rank; None if there are none."""
    group_of = {
        number: group
        for group in stand.groups
        for first, last in group.spans
        for number in range(first, last + 1)
        if number in wanted
    }
    if not group_of:
        return None
    numbers = tuple(sorted(group_of))
    rows = [group_of[number] for number in numbers]
    progress = RankProgress(
        tuple(row.phase for row in rows),
        tuple(row.step for row in rows),
        tuple(row.age_s for row in rows),
        tuple(row.activity for row in rows),
        tuple(row.activity_s for row in rows),
        tuple(row.place for row in rows),
    )
    return Elsewhere(numbers, progress, tuple(row.has_stepped for row in rows))


def _spans(numbers: Sequence[int]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)
