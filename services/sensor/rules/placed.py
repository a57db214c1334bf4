"""Limits a host's reports to the ranks that it was given. Pure.

A faulty daemon could claim any generation, and the detector would drop the true one for it; or any step. So reports
about ranks of other hosts, and about generations that were never granted, do not count.

A sensor reads a new placement a moment after the first host may report about it. Rank positions come again with every
report. What is reported once (steps, marks, restores) goes to the store meanwhile, for one such generation per report:
the store knows what was granted. Steps to sum up wait until the placement is known (`early_steps`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers, phases_of
from flyball.contracts.reports.signals import Report
from flyball.contracts.reports.training_health import RankCompute, RankLoss

Generation = tuple[str, int]  # job, generation
GivenRanks = Mapping[str, Collection[int]]  # in one generation: host -> its ranks


class OfGeneration(Protocol):
    """A part of a report about one generation."""

    @property
    def job(self) -> str: ...

    @property
    def generation(self) -> int: ...


class OfRank(OfGeneration, Protocol):
    """A part of a report about one rank."""

    @property
    def rank(self) -> int: ...


P = TypeVar("P", bound=OfRank)
V = TypeVar("V")


def given_in(plan: GenerationPlan) -> GivenRanks:
    """The ranks of each host of a generation."""
    return {host.host_id: _collected(host.ranks) for host in plan.hosts}


class Placed:
    """The placements at one moment: the newest generation of each running job, and earlier ones that may still run."""

    def __init__(self, given: Mapping[Generation, GivenRanks]) -> None:
        self.given = given  # of each generation: host -> its ranks
        self._newest: dict[str, int] = {}
        for job, generation in given:
            self._newest[job] = max(generation, self._newest.get(job, -1))
        self.jobs = frozenset(self._newest)
        self._own_workers: dict[str, tuple[Workers, ...]] = {}  # by host, from its last report, if all are its own

    def allows(self, report: Report) -> bool:
        """Whether its host may report all of it, and it has nothing that is reported once but steps: the usual case."""
        host_id, workers = report.facts.host_id, report.workers
        has_own = self._own_workers.get(host_id) is workers or self._has_own(host_id, workers)
        return has_own and self._is_plain(host_id, report)

    def split(self, report: Report) -> tuple[Report, Report]:
        """The part of a report for the detector, and the part to store. Both are the report itself if its host may
        report all of it. Workers that should be gone are stored, too."""
        host_id, workers, completed = report.facts.host_id, report.workers, report.completed
        if self.allows(report):
            return report, report
        is_plain = self._is_plain(host_id, report)
        own_steps = self.own_steps(host_id, completed)
        places = [self._places(host_id, of) for of in workers]
        own = msgspec.structs.replace(
            report,
            workers=tuple(_workers_at(of, at) for of, at in zip(workers, places, strict=True) if at),
            progress=tuple(_progress_at(of, at) for of, at in zip(report.progress, places, strict=True) if at),
            completed=own_steps,
        )
        if is_plain:
            return own, report
        news = self._first_unknown((*completed, *report.marks, *report.restores))
        stored = msgspec.structs.replace(
            report,
            completed=(*own_steps, *(steps for steps in completed if (steps.job, steps.generation) == news)),
            marks=self._those_of(host_id, report.marks, news),
            restores=self._those_of(host_id, report.restores, news),
        )
        return own, stored

    def own_steps(self, host_id: str, completed: Iterable[CompletedSteps]) -> tuple[CompletedSteps, ...]:
        """The steps of the host's own ranks."""
        places = ((steps, self._places(host_id, steps)) for steps in completed)
        return tuple(_steps_at(steps, at) for steps, at in places if at)

    def own_losses(self, host_id: str, losses: tuple[RankLoss, ...]) -> tuple[RankLoss, ...]:
        """The losses of the host's own ranks. Those of a generation that is unknown yet come again soon."""
        if all(loss.rank in self._given_to(host_id, loss) for loss in losses):
            return losses
        return tuple(loss for loss in losses if loss.rank in self._given_to(host_id, loss))

    def own_computes(self, host_id: str, computes: Iterable[RankCompute]) -> tuple[RankCompute, ...]:
        """Those of the host's own ranks."""
        return tuple(compute for compute in computes if compute.rank in self._given_to(host_id, compute))

    def early_steps(self, completed: Iterable[CompletedSteps]) -> tuple[CompletedSteps, ...]:
        """The steps of generations that are newer than those known here."""
        return tuple(steps for steps in completed if self.is_early(steps))

    def is_early(self, part: OfGeneration) -> bool:
        """Whether its generation is newer than those known here: it may just have been granted."""
        return part.generation > self._newest.get(part.job, -1)

    def unknown(self, report: Report) -> Generation | None:
        """A generation of the report's workers that is newer than those known here."""
        return self._first_unknown(report.workers)

    def _is_plain(self, host_id: str, report: Report) -> bool:
        return not (report.marks or report.restores or (report.completed and not self._completed_own(host_id, report)))

    def _has_own(self, host_id: str, workers: tuple[Workers, ...]) -> bool:
        has_own = all(self._is_own(host_id, of) for of in workers)
        if has_own:
            self._own_workers[host_id] = workers
        return has_own

    def _completed_own(self, host_id: str, report: Report) -> bool:
        workers = report.workers[0] if report.workers else None
        for steps in report.completed:
            are_of_workers = (
                workers is not None
                and steps.ranks == workers.ranks
                and steps.generation == workers.generation
                and steps.job == workers.job
                and self._own_workers.get(host_id) is report.workers
            )
            if not are_of_workers and not self._is_own(host_id, steps):
                return False
        return True

    def _given_to(self, host_id: str, part: OfGeneration) -> Collection[int]:
        of_generation = self.given.get((part.job, part.generation))
        return of_generation.get(host_id, ()) if of_generation is not None else ()

    def _is_own(self, host_id: str, columns: Workers | CompletedSteps) -> bool:
        given = self._given_to(host_id, columns)
        return all(rank in given for rank in columns.ranks)

    def _places(self, host_id: str, columns: Workers | CompletedSteps) -> list[int]:
        """The indices of the host's own ranks in these columns."""
        given = self._given_to(host_id, columns)
        return [place for place, rank in enumerate(columns.ranks) if rank in given]

    def _those_of(self, host_id: str, parts: Sequence[P], news: Generation | None) -> tuple[P, ...]:
        return tuple(
            part for part in parts if (part.job, part.generation) == news or part.rank in self._given_to(host_id, part)
        )

    def _first_unknown(self, parts: Iterable[OfGeneration]) -> Generation | None:
        return next(((part.job, part.generation) for part in parts if self.is_early(part)), None)


def _collected(ranks: Sequence[int]) -> Collection[int]:
    """A range if the ranks are consecutive, as nearly always: it takes a fifteenth of a set's memory."""
    span = range(min(ranks, default=0), max(ranks, default=-1) + 1)
    return span if len(span) == len(set(ranks)) else frozenset(ranks)


def _workers_at(of: Workers, places: Sequence[int]) -> Workers:
    if len(places) == len(of.ranks):
        return of
    return msgspec.structs.replace(of, ranks=_at(of.ranks, places), pids=_at(of.pids, places))


def _progress_at(of: RankProgress, places: Sequence[int]) -> RankProgress:
    if len(places) == len(of.steps):
        return of
    return RankProgress(
        _at(phases_of(of), places),
        _at(of.steps, places),
        _at(of.beacon_ages_s, places),
        _at(of.activities, places if of.activities else ()),
        _at(of.activities_s, places if of.activities else ()),
        _at(of.places, places if of.places else ()),
    )


def _steps_at(steps: CompletedSteps, places: Sequence[int]) -> CompletedSteps:
    if len(places) == len(steps.ranks):
        return steps
    times = tuple(_at(row, places) for row in steps.completed_at)
    return msgspec.structs.replace(steps, ranks=_at(steps.ranks, places), completed_at=times)


def _at(column: Sequence[V], places: Sequence[int]) -> tuple[V, ...]:
    return tuple(column[place] for place in places)
