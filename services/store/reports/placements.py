"""The placements of running jobs for sensors: which hosts are neighbours, and which host has which ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from sqlalchemy import Connection, select

from flyball.contracts.checkpoints import StoredPoints, Tier
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import GenerationPlan
from services.record.codec import load
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.detector.witnesses import neighbours
from services.sensor.rules.placed import GivenRanks, Placed, given_in
from services.store.reports.persistent_steps import NewestStored
from services.store.sql.database import Database
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import RunningPlans
from services.store.sql.tables import hosts, incidents, jobs, learned_jobs

Neighbours = Mapping[str, tuple[str, ...]]
_Generation = tuple[str, int]


class _Part(msgspec.Struct, frozen=True):
    """The part of a plan that is kept."""

    neighbours: Neighbours
    given: GivenRanks


class Placements(msgspec.Struct, frozen=True):
    """`neighbours`: host -> hosts whose engines are linked with its engine, nearest first. `hang_timeouts`: job ->
    seconds, for jobs that set one. `stored_points`: for jobs with a persistent tier. `troubled`: hosts that an open
    incident is about, or a job that waits to start."""

    neighbours: Neighbours
    placed: Placed
    hang_timeouts: Mapping[str, float] = {}
    learned: Mapping[str, LearnedJob] = {}  # by an earlier sensor, for jobs that are new here
    stored_points: StoredPoints = {}
    troubled: frozenset[str] = frozenset()


class SqlPlacements:
    """Belongs to one thread at a time."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._plans = RunningPlans(_part_of)
        self._seen: Mapping[_Generation, _Part] = {}
        self._before: dict[_Generation, GivenRanks] = {}  # for each job the generation before the one in `_seen`
        self._all = Placements({}, Placed({}))
        self._stored = NewestStored()
        self._persistent: frozenset[str] = frozenset()  # jobs with that tier

    def read(self) -> Placements:
        """Return the placements of all running jobs: the same object as before if nothing changed."""
        with self._db.read() as connection:
            known = self._plans.read(connection)
            troubled = _troubled(connection, known)
            if known is self._seen:
                stored = self._stored_points(connection)
                if (stored, troubled) != (self._all.stored_points, self._all.troubled):
                    self._all = msgspec.structs.replace(self._all, stored_points=stored, troubled=troubled)
                return self._all
            specs = _specs(connection)
            self._persistent = frozenset(
                job for job, spec in specs.items() if spec.checkpoint.policy(Tier.PERSISTENT).is_on
            )
            timeouts = {job: spec.hang_timeout_s for job, spec in specs.items() if spec.hang_timeout_s}
            learned = _learned(connection, {job for job, _ in known} - {job for job, _ in self._seen})
            stored = self._stored_points(connection)
        self._before = _before(known, self._seen, self._before)
        self._seen = known
        near = {host_id: names for key in sorted(known) for host_id, names in known[key].neighbours.items()}
        given = {key: part.given for key, part in known.items()}
        self._all = Placements(near, Placed(self._before | given), timeouts, learned, stored, troubled)
        return self._all

    def _stored_points(self, connection: Connection) -> StoredPoints:
        return self._stored.read(connection, self._persistent) if self._persistent else {}


def engine_addresses(db: Database, sought: Collection[str]) -> dict[str, str]:
    """Return host -> "ip:port" of its engine, as it last reported, for those of the hosts that have one."""
    with db.read() as connection:
        query = select(hosts.c.host_id, hosts.c.engine_address).where(hosts.c.host_id.in_(sorted(sought)))
        return {row.host_id: row.engine_address for row in connection.execute(query) if row.engine_address}


def _troubled(connection: Connection, known: Mapping[_Generation, _Part]) -> frozenset[str]:
    """Return the hosts that an open incident is about, those of its job, and those that a submitted job names."""
    found: set[str] = set()
    given = {job: part.given for (job, _), part in known.items()}
    for job, host_id in connection.execute(select(incidents.c.job, incidents.c.host_id).where(~incidents.c.closed)):
        found.update((host_id,) if host_id else (), given.get(job, ()))
    waiting = select(jobs.c.job, jobs.c.spec).where(jobs.c.state == JobState.SUBMITTED.value)
    for job, document in connection.execute(waiting):
        spec = readable("jobs", job, load, document, JobSpec, job=job)
        found.update(spec.hosts if spec is not None else ())
    return frozenset(found)


def _specs(connection: Connection) -> dict[str, JobSpec]:
    """Return the specifications of running jobs."""
    running = select(jobs.c.job, jobs.c.spec).where(jobs.c.state == JobState.RUNNING.value)
    rows = connection.execute(running).all()
    found = {row.job: readable("jobs", row.job, load, row.spec, JobSpec, job=row.job) for row in rows}
    return {job: spec for job, spec in found.items() if spec is not None}


def _learned(connection: Connection, names: Collection[str]) -> dict[str, LearnedJob]:
    """Return what sensors learned about these jobs, except about an earlier run of the same name. A run with a name of
    its own has been resumed."""
    is_of_this_run = (jobs.c.submitted_at <= learned_jobs.c.told_at) | (jobs.c.run != "")
    of_this_run = (jobs.c.job == learned_jobs.c.job) & is_of_this_run
    query = select(learned_jobs).join(jobs, of_this_run).where(learned_jobs.c.job.in_(sorted(names)))
    rows = connection.execute(query).all()
    found = {row.job: readable("learned_jobs", row.job, load, row.learned, LearnedJob) for row in rows}
    return {job: learned for job, learned in found.items() if learned is not None}


def _part_of(plan: GenerationPlan) -> _Part:
    return _Part(neighbours(plan.hosts, plan.peers), given_in(plan))


def _before(
    known: Mapping[_Generation, _Part], seen: Mapping[_Generation, _Part], older: Mapping[_Generation, GivenRanks]
) -> dict[_Generation, GivenRanks]:
    """Return for each job in `known` the newest generation that was seen before its present one."""
    earlier = {**older, **{key: part.given for key, part in seen.items()}}
    present = dict(known.keys())  # job -> generation: each job has one
    newest = {job: generation for job, generation in sorted(earlier) if job in present and generation < present[job]}
    return {key: earlier[key] for key in newest.items()}
