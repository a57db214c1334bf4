"""A host's ranks and their completed steps as columns: one tuple per field, with one place per rank.

Every host reports every second, and its eight ranks mostly repeat each other. Columns make that a few tuples, which a
sensor compares as a whole. What changes only when a worker starts or ends is kept apart from what always changes
(docs/decisions/0010). `statuses_in` and `steps_in` yield the ranks one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from flyball.contracts.cluster import Activity, Phase, RankStatus
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import (
    Duration,
    Generation,
    JobName,
    Moment,
    Pid,
    Place,
    Rank,
    RepeatedJobName,
    SeenStep,
)
from flyball.contracts.reports.rank_stands import RankStand

Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1)]

_AT_WORK = (Activity.UNKNOWN, Activity.ACTIVE)


class Workers(msgspec.Struct, frozen=True, gc=False):
    """The live workers of one generation on a host; a report has one of these per generation."""

    job: JobName
    generation: Generation
    ranks: Ranks  # each once
    pids: tuple[Pid, ...]  # in the order of `ranks`


class RankProgress(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The beacons of `Workers`, in the order of its ranks."""

    phases: tuple[Phase, ...]  # a single one applies to all ranks
    steps: tuple[SeenStep, ...]  # newest completed, -1 before the first
    beacon_ages_s: tuple[Duration, ...]  # since each beacon last moved
    activities: tuple[Activity, ...] = ()  # (): unknown or active, as nearly always
    activities_s: tuple[Duration, ...] = ()  # how long each activity has lasted; as long as `activities`
    places: tuple[Place, ...] = ()  # as long as `activities`, or () if none is known
    stands: tuple[RankStand, ...] = ()  # of ranks that have stood still for long, by rank


class RankSteps(msgspec.Struct, frozen=True, gc=False):
    """Steps that one rank completed since the last report: completed_at[i] is the wall time of first_step + i."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    first_step: SeenStep
    completed_at: tuple[Moment, ...]


class CompletedSteps(msgspec.Struct, frozen=True, gc=False):
    """The same, for several ranks: `completed_at[i][k]` is the time at which `ranks[k]` completed first_step + i."""

    job: RepeatedJobName
    generation: Generation
    ranks: Ranks  # each once; a rank that skipped steps appears in several of these
    first_step: SeenStep
    completed_at: Annotated[tuple[tuple[Moment, ...], ...], msgspec.Meta(min_length=1)]

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.completed_at) - 1


def phases_of(progress: RankProgress) -> tuple[Phase, ...]:
    """The phase of each rank."""
    return progress.phases if len(progress.phases) != 1 else progress.phases * len(progress.steps)


def statuses_in(workers: Sequence[Workers], progress: Sequence[RankProgress]) -> Iterator[RankStatus]:
    """Yield every rank on its own. The columns must have been checked."""
    for group, beacons in zip(workers, progress, strict=True):
        columns = (group.ranks, group.pids, phases_of(beacons), beacons.steps, beacons.beacon_ages_s)
        if not beacons.activities and not beacons.stands:
            for rank, pid, phase, step, beacon_age_s in zip(*columns, strict=True):
                yield RankStatus(group.job, group.generation, rank, pid, phase, step, beacon_age_s)
            continue
        count, stands = len(group.ranks), {stand.rank: stand for stand in beacons.stands}
        seen = (
            beacons.activities or (Activity.UNKNOWN,) * count,
            beacons.activities_s or (0.0,) * count,
            beacons.places or ("",) * count,
            map(stands.get, group.ranks),
        )
        for row in zip(*columns, *seen, strict=True):
            yield RankStatus(group.job, group.generation, *row)


def in_columns(statuses: Iterable[RankStatus]) -> tuple[tuple[Workers, ...], tuple[RankProgress, ...]]:
    """The inverse of `statuses_in`. Generations and ranks keep the order of their first appearance."""
    groups: dict[tuple[str, int], list[RankStatus]] = {}
    for status in statuses:
        groups.setdefault((status.job, status.generation), []).append(status)
    workers, progress = [], []
    for (job, generation), group in groups.items():
        phases = tuple(status.phase for status in group)
        is_seen = any(status.activity not in _AT_WORK for status in group)
        workers.append(Workers(job, generation, tuple(s.rank for s in group), tuple(s.pid for s in group)))
        progress.append(
            RankProgress(
                phases=phases[:1] if len(set(phases)) == 1 else phases,
                steps=tuple(status.step for status in group),
                beacon_ages_s=tuple(status.beacon_age_s for status in group),
                activities=tuple(status.activity for status in group) if is_seen else (),
                activities_s=tuple(status.activity_s for status in group) if is_seen else (),
                places=tuple(status.place for status in group) if any(s.place for s in group) and is_seen else (),
                stands=tuple(status.stand for status in group if status.stand is not None),
            )
        )
    return tuple(workers), tuple(progress)


def steps_in(completed: Iterable[CompletedSteps]) -> Iterator[RankSteps]:
    """Yield the steps of every rank on its own. The columns must have been checked."""
    for steps in completed:
        for rank, times in zip(steps.ranks, zip(*steps.completed_at, strict=True), strict=True):
            yield RankSteps(steps.job, steps.generation, rank, steps.first_step, times)


def steps_together(runs: Iterable[RankSteps]) -> tuple[CompletedSteps, ...]:
    """The inverse of `steps_in`: ranks that completed the same steps share one entry."""
    groups: dict[tuple[str, int, int, int], dict[int, tuple[float, ...]]] = {}
    for run in runs:
        if run.completed_at:
            key = (run.job, run.generation, run.first_step, len(run.completed_at))
            groups.setdefault(key, {})[run.rank] = run.completed_at
    return tuple(
        CompletedSteps(job, generation, tuple(times), first_step, tuple(zip(*times.values(), strict=True)))
        for (job, generation, first_step, _), times in groups.items()
    )


def check_workers(workers: Sequence[Workers]) -> None:
    """Raise InvalidMessage unless every rank is listed once."""
    if len({(group.job, group.generation) for group in workers}) != len(workers):
        raise _invalid("lists a generation twice among its workers", "list all ranks of a generation together")
    for group in workers:
        if len(group.pids) != len(group.ranks):
            raise _unequal(f"workers of {group.job!r}", "pids", len(group.pids), len(group.ranks))
        _check_once(group.job, group.ranks)


def check_progress(workers: Sequence[Workers], progress: Sequence[RankProgress]) -> None:
    """Raise InvalidMessage unless all columns are as long as those of the workers."""
    if len(workers) != len(progress):
        raise _invalid(
            f"has workers of {len(workers)} generations but progress of {len(progress)}",
            "send one `progress` per entry of `workers`, in the same order",
        )
    for place, group in enumerate(workers):  # for every report: faster than zip
        beacons, count = progress[place], len(group.ranks)
        if len(beacons.steps) != count or len(beacons.beacon_ages_s) != count or len(beacons.phases) not in (1, count):
            for name in ("steps", "beacon_ages_s", "phases"):
                if len(column := getattr(beacons, name)) != count and (name != "phases" or len(column) != 1):
                    raise _unequal(f"progress of {group.job!r}", name, len(column), count)
        if beacons.activities or beacons.activities_s or beacons.places:
            for name in ("activities", "activities_s", "places"):
                if len(column := getattr(beacons, name)) != count and (name != "places" or column):
                    raise _unequal(f"progress of {group.job!r}", name, len(column), count)
        if beacons.stands and len({stand.rank for stand in beacons.stands} & {*group.ranks}) != len(beacons.stands):
            raise _invalid(f"says where ranks of {group.job!r} stand that it does not list", "list each rank once")


def check_completed(completed: Sequence[CompletedSteps], workers: Sequence[Workers]) -> None:
    """Raise InvalidMessage unless every step has a time for each rank, and every rank is listed once. Requires checked
    `workers`."""
    for steps in completed:
        count = len(steps.ranks)
        for times in steps.completed_at:
            if len(times) != count:
                raise _unequal(f"completed steps of {steps.job!r}", "completed_at", len(times), count)
        if not workers or steps.ranks != workers[0].ranks:  # which nearly never happens
            _check_once(steps.job, steps.ranks)


def _check_once(job: str, ranks: Sequence[int]) -> None:
    if len(set(ranks)) != len(ranks):
        rank = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise _invalid(f"lists rank {rank} of {job!r} twice", "list each rank once")


def _unequal(where: str, column: str, length: int, ranks: int) -> InvalidMessage:
    return _invalid(
        f"has {length} values of `{column}` for {ranks} ranks in the {where}",
        "send one value per rank, in the order of `ranks`",
    )


def _invalid(what: str, hint: str) -> InvalidMessage:
    return InvalidMessage(f"The report {what}.", hint=hint)
