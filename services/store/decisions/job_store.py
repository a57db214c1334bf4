"""Users' requests about jobs: submit, submit again after the end, stop."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from flyball.contracts.checkpoints import Lineage, with_world_sizes
from flyball.contracts.cluster import Again, JobSpec, JobState
from flyball.contracts.decisions import GenerationPlan, Incident, IncidentState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import Event, EventKind
from flyball.contracts.identity import run_id
from services.controller.round.view import JobChange
from services.record.codec import dump, load
from services.rules.job_differences import differences
from services.store.decisions import outcome_writer
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.lease import leader
from services.store.sql.left_state import LAST_SIGN_SQL
from services.store.sql.set_aside import needed
from services.store.sql.shared_reads import HAS_ENDED, plan_of
from services.store.sql.tables import actions, generations, incidents, job_failures, jobs


class PastRun(msgspec.Struct, frozen=True):
    """An ended job, as stored."""

    state: JobState
    run: str
    lineage: Lineage
    world_size: int
    ended_at: float


class SqlJobStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    def submit(
        self,
        spec: JobSpec,
        now: float,
        again: Again = Again.NO,
        *,
        ended_at: float | None = None,
        run: str = "",
        adopted: Lineage = (),
    ) -> bool:
        """Record a job. Return True if it is new, or resumes or starts afresh after it had ended.

        Return False if the same job exists, or if it ended at another time than `ended_at`: somebody else restarted it.
        `adopted`: a lineage to continue, which `run` left in a store. Raises Conflict if a different job has its name.
        """

        def work(connection: Connection) -> bool:
            mine = jobs.c.job == spec.job
            first: dict[str, int] = {}  # the goodput of what --fresh threw away is another account
            row = {
                "job": spec.job,
                "spec": dump(spec),
                "state": JobState.SUBMITTED.value,
                "message": "waits for hosts",
                "submitted_at": now,
                "ended_at": 0.0,
                "stop_requested": False,
                "newest_step": max((entry.upto_step or 0 for entry in adopted), default=-1),
                "generation": -1,
                "run": run,
                "adopted": dump(adopted) if adopted else None,
                "loss": "",
                "loss_step": -1,
            }
            try:
                with connection.begin_nested():
                    connection.execute(insert(jobs).values(row))
            except IntegrityError:
                known = connection.execute(select(jobs).where(mine).with_for_update()).one()
                state = needed("jobs", spec.job, JobState, known.state)
                if state.ending and again is not Again.NO:
                    raise Conflict(
                        f"Job {spec.job!r} is {known.state}: some of its workers still run.",
                        hint="submit it again once it has ended",
                    ) from None
                is_over = state.ended and ended_at in (None, known.ended_at)
                if not is_over or again is Again.NO:
                    before: JobSpec = needed("jobs", spec.job, load, known.spec, JobSpec)
                    if differs := differences(before, spec):
                        raise Conflict(
                            f"A job {spec.job!r} with another specification exists: {differs}.",
                            hint="choose another name with --job, or wait until it ends",
                        ) from None
                    return False
                _begin_again(connection, known, spec, now, again, run=run, adopted=adopted)
                if again is Again.FRESH:
                    first = {"first_generation": known.generation + 1}
            data = {"world_size": spec.world_size, "save_every_steps": spec.checkpoint.every_steps, **first}
            submitted = Event(at=now, kind=EventKind.JOB_SUBMITTED, job=spec.job, data=data)
            events.append(connection, [submitted])
            return True

        return self._db.transact(work)

    def record_killed(self, job: str, now: float) -> None:
        """End a job that ran when all its processes and its supervisor were killed. For a database that no supervisor
        uses."""

        def work(connection: Connection) -> None:
            if not self._db.is_sqlite and leader(connection) is not None:
                return  # a shared database: the controller that leads there knows better
            state = connection.scalar(select(jobs.c.state).where(jobs.c.job == job, ~HAS_ENDED))
            if state is not None:
                known = JobState(state)
                ended = known.outcome if known.ending else JobState.STOPPED
                change = JobChange(job, ended, "everything of it was killed")
                last_sign = max(filter(None, connection.execute(text(LAST_SIGN_SQL)).one()), default=now)
                news = outcome_writer.store_jobs(connection, [change], min(last_sign, now))
                events.append(connection, [*news, *_close(connection, job, now)])

        self._db.transact(work)

    def past(self, job: str) -> PastRun | None:
        """Return the job as it ended, with the lineage to continue from; None if there is no such job."""
        with self._db.read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.job == job)).first()
            if row is None:
                return None
            mine = (generations.c.job == job, generations.c.generation == row.generation)
            granted = connection.execute(select(generations.c.plan, generations.c.lineage).where(*mine)).first()
        run, lineage = row.run or run_id(row.submitted_at), load(row.adopted, Lineage) if row.adopted else ()
        if granted is not None:
            plan = load(granted.plan, GenerationPlan)
            if plan.run == run:
                lineage = load(granted.lineage, Lineage) if granted.lineage else plan.parent_lineage
        spec = load(row.spec, JobSpec)
        return PastRun(JobState(row.state), run, lineage, spec.world_size, row.ended_at)

    def request_stop(self, job: str, now: float) -> None:
        """Request that the controller stop a job. Does nothing to one that has ended. Raises NotFound."""

        def work(connection: Connection) -> None:
            found = connection.execute(select(jobs.c.stop_requested).where(jobs.c.job == job)).first()
            if found is None:
                raise NotFound(f"There is no job {job!r}.", hint="`flyball get jobs` lists them")
            if not found.stop_requested:
                connection.execute(update(jobs).where(jobs.c.job == job).values(stop_requested=True))
                events.append(connection, [])

        self._db.transact(work)


def _begin_again(
    connection: Connection, known: Row[Any], spec: JobSpec, now: float, again: Again, *, run: str, adopted: Lineage
) -> None:
    """Restart a job that ended. Its generation numbers continue, so that nothing stale acts. Its failures, and the
    restarts that they used up, are forgotten."""
    before: JobSpec = needed("jobs", spec.job, load, known.spec, JobSpec)
    if before.world_size != spec.world_size:
        _fill_in_world_sizes(connection, known, before.world_size)
    values: dict[str, Any] = {
        "spec": dump(spec),
        "state": JobState.SUBMITTED.value,
        "message": "waits for hosts",
        "ended_at": 0.0,
        "stop_requested": False,
        "adopted": dump(adopted) if adopted else None,
    }
    values["submitted_at"] = now
    if adopted:
        values["run"] = run
    elif again is Again.RESUME and not _has_begun(connection, known):
        del values["adopted"]  # it ended before it used that lineage
        if known.adopted and before.world_size != spec.world_size:
            values["adopted"] = dump(
                with_world_sizes(needed("jobs", spec.job, load, known.adopted, Lineage), before.world_size)
            )
    if again is Again.FRESH:
        values |= {"run": "", "newest_step": -1, "loss": "", "loss_step": -1}
    elif not adopted:
        values["run"] = known.run or run_id(known.submitted_at)
    connection.execute(update(jobs).where(jobs.c.job == spec.job).values(values))
    connection.execute(delete(job_failures).where(job_failures.c.job == spec.job))
    events.append(connection, _close(connection, spec.job, now))


def _fill_in_world_sizes(connection: Connection, known: Row[Any], ranks: int) -> None:
    """The job gets another number of ranks: `ranks` is what unknown ones in its history meant so far."""
    mine = (generations.c.job == known.job, generations.c.generation == known.generation)
    row = connection.execute(select(generations.c.plan, generations.c.lineage).where(*mine)).first()
    if row is None:
        return
    plan: GenerationPlan = load(row.plan, GenerationPlan)
    plan = msgspec.structs.replace(plan, parent_lineage=with_world_sizes(plan.parent_lineage, ranks))
    lineage = dump(with_world_sizes(load(row.lineage, Lineage), ranks)) if row.lineage else row.lineage
    connection.execute(update(generations).where(*mine).values(plan=dump(plan), lineage=lineage))


def _has_begun(connection: Connection, known: Row[Any]) -> bool:
    """Return whether a generation of the job's present run was granted."""
    plan = plan_of(connection, known.job, known.generation)
    return plan is not None and plan.run == (known.run or run_id(known.submitted_at))


def _close(connection: Connection, job: str, now: float) -> list[Event]:
    """Close the incidents and actions that the job's earlier life left open."""
    open_incidents = select(incidents.c.document).where(incidents.c.job == job, ~incidents.c.closed)
    closed = [
        msgspec.structs.replace(
            load(document, Incident), state=IncidentState.RESOLVED, since=now, resolved_at=now, holding_for=""
        )
        for document in connection.scalars(open_incidents)
    ]
    numbers = connection.scalars(select(actions.c.number).where(actions.c.job == job, ~actions.c.ended))
    news = outcome_writer.store_incidents(connection, closed, ())
    return [*news, *outcome_writer.supersede(connection, [f"act-{number}" for number in numbers], now)]
