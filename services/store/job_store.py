"""What users ask for: jobs submitted and stopped."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import Event, EventKind
from services.store import events
from services.store.codec import dump, load
from services.store.database import Database
from services.store.tables import jobs


class SqlJobStore:
    def __init__(self, db: Database) -> None:
        self._db = db

    def submit(self, spec: JobSpec, now: float) -> bool:
        """Record a job; True if it is new, False if the very same one is there already. Raises Conflict if another
        one has its name."""

        def work(connection: Connection) -> bool:
            mine = jobs.c.job == spec.job
            row = {
                "job": spec.job,
                "spec": dump(spec),
                "state": JobState.SUBMITTED.value,
                "message": "waits for hosts",
                "submitted_at": now,
                "ended_at": 0.0,
                "stop_requested": False,
                "newest_step": -1,
                "generation": -1,
            }
            try:
                with connection.begin_nested():
                    connection.execute(insert(jobs).values(row))
            except IntegrityError:
                stored = load(connection.execute(select(jobs.c.spec).where(mine)).scalar_one(), JobSpec)
                if stored != spec:
                    raise Conflict(
                        f"A job {spec.job!r} with another specification exists.", hint="give this one another name"
                    ) from None
                return False
            data = {"world_size": spec.world_size, "save_every_steps": spec.checkpoint.every_steps}
            submitted = Event(at=now, kind=EventKind.JOB_SUBMITTED, job=spec.job, data=data)
            events.append(connection, [submitted])
            return True

        return self._db.transact(work)

    def request_stop(self, job: str, now: float) -> None:
        """Have the controller stop a job; nothing happens to one that has ended. Raises NotFound."""

        def work(connection: Connection) -> None:
            found = connection.execute(select(jobs.c.stop_requested).where(jobs.c.job == job)).first()
            if found is None:
                raise NotFound(f"There is no job {job!r}.", hint="`flyball status` lists the jobs")
            if not found.stop_requested:
                connection.execute(update(jobs).where(jobs.c.job == job).values(stop_requested=True))
                events.append(connection, [])

        self._db.transact(work)
