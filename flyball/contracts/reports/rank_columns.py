"""Where a host's ranks are and what they completed, as columns: a tuple per subject, in it a place per rank.

A report comes every second from every host, and says the same of eight ranks in eight ways. As columns it is a few
tuples, which a sensor compares as a whole; what changes only when a worker starts or ends is apart from what always
changes (docs/decisions/0010). Who looks at ranks one by one takes them from `statuses_in` and `steps_in`.
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

Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1)]

_AT_WORK = (Activity.UNKNOWN, Activity.ACTIVE)


class Workers(msgspec.Struct, frozen=True, gc=False):
    """The live workers of one generation on a host; a report has one of these for each generation."""

    job: JobName
    generation: Generation
    ranks: Ranks  # each once
    pids: tuple[Pid, ...]  # in the order of `ranks`


class RankProgress(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What the beacons of `Workers` show, in the order of its ranks."""

    phases: tuple[Phase, ...]  # one alone is that of all
    steps: tuple[SeenStep, ...]  # newest completed, -1 before the first
    beacon_ages_s: tuple[Duration, ...]  # since each beacon last moved
    activities: tuple[Activity, ...] = ()  # (): nothing is known but that all may be at work, as nearly always
    activities_s: tuple[Duration, ...] = ()  # for how long each has been that; as long as `activities`
    places: tuple[Place, ...] = ()  # as long as `activities`, or () if none is known


class RankSteps(msgspec.Struct, frozen=True, gc=False):
    """Steps that one rank completed since the last report: completed_at[i] is the wall time of first_step + i."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    first_step: SeenStep
    completed_at: tuple[Moment, ...]


class CompletedSteps(msgspec.Struct, frozen=True, gc=False):
    """The same steps, completed by several ranks since the last report: completed_at[i][k] is the wall time at which
    ranks[k] completed first_step + i."""

    job: RepeatedJobName
    generation: Generation
    ranks: Ranks  # each once; a rank that skipped steps is in several of these
    first_step: SeenStep
    completed_at: Annotated[tuple[tuple[Moment, ...], ...], msgspec.Meta(min_length=1)]

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.completed_at) - 1


def phases_of(progress: RankProgress) -> tuple[Phase, ...]:
    """One for each rank."""
    return progress.phases if len(progress.phases) != 1 else progress.phases * len(progress.steps)


def statuses_in(workers: Sequence[Workers], progress: Sequence[RankProgress]) -> Iterator[RankStatus]:
    """Every rank by itself, of columns that were checked."""
    for of, at in zip(workers, progress, strict=True):
        columns = (of.ranks, of.pids, phases_of(at), at.steps, at.beacon_ages_s)
        if not at.activities:
            for rank, pid, phase, step, beacon_age_s in zip(*columns, strict=True):
                yield RankStatus(of.job, of.generation, rank, pid, phase, step, beacon_age_s)
            continue
        seen = (at.activities, at.activities_s, at.places or ("",) * len(of.ranks))
        for row in zip(*columns, *seen, strict=True):
            yield RankStatus(of.job, of.generation, *row)


def in_columns(statuses: Iterable[RankStatus]) -> tuple[tuple[Workers, ...], tuple[RankProgress, ...]]:
    """What `statuses_in` takes apart. Generations are in the order in which they are first seen, and so are ranks."""
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
            )
        )
    return tuple(workers), tuple(progress)


def steps_in(completed: Iterable[CompletedSteps]) -> Iterator[RankSteps]:
    """The steps of every rank by itself, of columns that were checked."""
    for steps in completed:
        for rank, times in zip(steps.ranks, zip(*steps.completed_at, strict=True), strict=True):
            yield RankSteps(steps.job, steps.generation, rank, steps.first_step, times)


def steps_together(runs: Iterable[RankSteps]) -> tuple[CompletedSteps, ...]:
    """What `steps_in` takes apart: ranks that completed the same steps are told of together."""
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
    """Raise InvalidMessage unless every rank is told of once."""
    if len({(of.job, of.generation) for of in workers}) != len(workers):
        raise _invalid("has a generation twice among its workers", "tell of all ranks of a generation together")
    for of in workers:
        if len(of.pids) != len(of.ranks):
            raise _unequal(f"workers of {of.job!r}", "pids", len(of.pids), len(of.ranks))
        _check_once(of.job, of.ranks)


def check_progress(workers: Sequence[Workers], progress: Sequence[RankProgress]) -> None:
    """Raise InvalidMessage unless all columns are as long as those of the workers."""
    if len(workers) != len(progress):
        raise _invalid(
            f"tells of the workers of {len(workers)} generations and of the progress of {len(progress)}",
            "send a `progress` for each of `workers`, in its order",
        )
    for place, of in enumerate(workers):
        at, count = progress[place], len(of.ranks)
        if len(at.steps) != count or len(at.beacon_ages_s) != count or len(at.phases) not in (1, count):
            for name in ("steps", "beacon_ages_s", "phases"):
                if len(column := getattr(at, name)) != count and (name != "phases" or len(column) != 1):
                    raise _unequal(f"progress of {of.job!r}", name, len(column), count)
        if at.activities or at.activities_s or at.places:
            for name in ("activities", "activities_s", "places"):
                if len(column := getattr(at, name)) != count and (name != "places" or column):
                    raise _unequal(f"progress of {of.job!r}", name, len(column), count)


def check_completed(completed: Sequence[CompletedSteps], workers: Sequence[Workers]) -> None:
    """Raise InvalidMessage unless every step has a moment for each rank, and every rank is told of once. The
    `workers` were looked at before."""
    for steps in completed:
        count = len(steps.ranks)
        for times in steps.completed_at:
            if len(times) != count:
                raise _unequal(f"completed steps of {steps.job!r}", "completed_at", len(times), count)
        if not workers or steps.ranks != workers[0].ranks:  # as nearly never
            _check_once(steps.job, steps.ranks)


def _check_once(job: str, ranks: Sequence[int]) -> None:
    if len(set(ranks)) != len(ranks):
        rank = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise _invalid(f"has rank {rank} of {job!r} twice", "tell of each rank once")


def _unequal(where: str, column: str, length: int, ranks: int) -> InvalidMessage:
    return _invalid(
        f"has {length} values of `{column}` for {ranks} ranks in the {where}",
        "send one value for each rank, in the order of `ranks`",
    )


def _invalid(what: str, hint: str) -> InvalidMessage:
    return InvalidMessage(f"The report {what}.", hint=hint)
