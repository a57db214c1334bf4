"""Reads jobs and their newest generations for the policy's view. Those that cannot be decoded are set aside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.errors import NotFound
from services.controller.round.view import ReportedStanding
from services.record.codec import load
from services.record.host_views import CachedHost
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import GivenPlans, plan_of
from services.store.sql.tables import generations, jobs


class KnownPlan(msgspec.Struct, frozen=True):
    """The newest generation of a job."""

    spec: str  # the job's document then: a plan changes only with it
    plan: GenerationPlan
    given: Mapping[str, frozenset[int]]  # host -> its ranks

    @property
    def ranks(self) -> int:
        return sum(map(len, self.given.values()))


class ReadableJobs:
    """Keeps what it decoded until it changes. Belongs to one thread."""

    def __init__(self) -> None:
        self.plans: dict[tuple[str, int], KnownPlan] = {}  # (job, generation) -> plan
        self.lineages: dict[str, tuple[str, Lineage]] = {}  # job -> its newest generation's, with the document
        self.adopted: dict[str, Lineage] = {}  # job -> what it continues from
        self.specs: dict[str, JobSpec] = {}
        self._given = GivenPlans()
        self._documents: dict[str, str] = {}  # job -> of its specification

    def read(self, connection: Connection, rows: Sequence[Row[Any]]) -> tuple[list[Row[Any]], Mapping[str, Any]]:
        """Return those of these rows of jobs that can be decoded, and job -> the row of its newest generation."""
        found = [row for row in rows if readable("jobs", row.job, self._take, row, job=row.job)]
        running = self._generations(connection, found)
        lost = {row.job for row in found if row.job not in running and self._is_granted(connection, row)}
        names = {row.job for row in found} - lost
        for of in (self.specs, self._documents, self.lineages, self.adopted):
            for job in of.keys() - names:
                of.pop(job)
        return [row for row in found if row.job in names], {job: row for job, row in running.items() if job in names}

    def copies_of(
        self, connection: Connection, hosts: Sequence[CachedHost], named: Collection[str] | None
    ) -> Iterator[ShardCopy]:
        """Yield the copies that hosts have of these jobs (None: of all), if they were given ranks of the job: in its
        newest generation, or in the copy's. An adopted job's earlier generations are not known."""
        newest = {job: known.given for (job, _), known in self.plans.items()}
        for host in hosts:
            for copy in host.copies:
                if named is not None and copy.job not in named:
                    continue
                if host.host_id in newest.get(copy.job, ()):
                    yield copy
                    continue
                given = self._given.read(connection, copy.job, copy.generation)
                if host.host_id in given or not given:
                    yield copy

    def _take(self, row: Row[Any]) -> bool:
        if self._documents.get(row.job) != row.spec:
            self.specs[row.job] = load(row.spec, JobSpec)
            self._documents[row.job] = row.spec
        self.adopted.pop(row.job, None)
        if row.adopted:
            self.adopted[row.job] = load(row.adopted, Lineage)
        JobState(row.state)
        return all(isinstance(number, int) for number in (row.generation, row.newest_step))

    def _is_granted(self, connection: Connection, row: Row[Any]) -> bool:
        """Whether the job has a newest generation, which then could not be decoded."""
        mine = (generations.c.job == row.job, generations.c.generation == row.generation)
        return connection.scalar(select(generations.c.job).where(*mine)) is not None

    def _generations(self, connection: Connection, rows: Sequence[Row[Any]]) -> dict[str, Any]:
        """Return the newest generation of each job. Reads each plan, which may be long, once for each specification."""
        specs = {row.job: row.spec for row in rows}
        if not specs:
            return {}
        columns = generations.c
        of_jobs = (
            select(columns.job, columns.generation, columns.started_at, columns.restore_step, columns.lineage)
            .join(jobs, (jobs.c.job == columns.job) & (jobs.c.generation == columns.generation))
            .where(columns.job.in_(list(specs)))
        )
        running: dict[str, Any] = {row.job: row for row in connection.execute(of_jobs)}
        present = {(row.job, row.generation) for row in running.values()}
        self.plans = {key: known for key, known in self.plans.items() if key in present and known.spec == specs[key[0]]}
        for job, generation in sorted(present - self.plans.keys()):
            name = f"{job} {generation}"
            known = readable("generations", name, self._plan, connection, job, generation, specs[job], job=job)
            if known is None:
                del running[job]
            else:
                self.plans[job, generation] = known
        for job, row in list(running.items()):
            name = f"{job} {row.generation}"
            if readable("generations", name, self._lineage, row, job=job) is None:
                del running[job]
        return running

    def _plan(self, connection: Connection, job: str, generation: int, spec: str) -> KnownPlan:
        plan = plan_of(connection, job, generation)
        if plan is None:
            raise NotFound("its plan cannot be read", hint="somebody else changed rows: restore a backup")
        return KnownPlan(spec, plan, {host.host_id: frozenset(host.ranks) for host in plan.hosts})

    def _lineage(self, row: Row[Any]) -> Lineage:
        document, lineage = self.lineages.get(row.job, ("", ()))
        if row.lineage and document != row.lineage:
            document, lineage = row.lineage, load(row.lineage, Lineage)
        elif not row.lineage:
            document, lineage = "", self.plans[row.job, row.generation].plan.parent_lineage
        self.lineages[row.job] = document, lineage
        return lineage


def with_unreadable(
    placed: Mapping[str, str], cached: Mapping[str, CachedHost], unreadable: set[str]
) -> Mapping[str, str]:
    """Add hosts with workers of jobs that were set aside: they are not free."""
    if not unreadable:
        return placed
    of = {name: unreadable & host.workers.keys() for name, host in cached.items()}
    return {**{name: min(jobs) for name, jobs in of.items() if jobs}, **placed}


def told_of(ahead: Iterable[ReportedStanding]) -> set[str]:
    """Return the hosts of standings, and those that their jobs are placed on."""
    placed = {host.host_id for one in ahead for held in one.standing.jobs for host in held.placement.hosts}
    return placed.union(one.standing.host_id for one in ahead)
