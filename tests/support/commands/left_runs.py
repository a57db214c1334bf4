"""State folders as `flyball run` leaves them, without a run."""

from __future__ import annotations

import json
from pathlib import Path

from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.events import Event, EventKind
from services.store.decisions.job_store import SqlJobStore
from services.store.sql import events, tables
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

GONE = 2**22 - 1  # no process has this id


def left(
    root: Path,
    job: str,
    *,
    at: float,
    state: JobState = JobState.RUNNING,
    ended_at: float = 0.0,
    folder: str = "",
    pid: int = GONE,
) -> Path:
    """A real database as `flyball run` leaves it in root/jobs, and the record of its supervisor."""
    supervisor = root / "jobs" / (folder or job) / "supervisor"
    supervisor.mkdir(parents=True, exist_ok=True)
    (supervisor / "supervisor.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": pid}))
    db = Database(f"sqlite:///{supervisor / 'flyball.sqlite'}")
    try:
        migrate(db)
        SqlJobStore(db).submit(JobSpec(job=job, argv=("train.py",), workdir="/", nnodes=1, nproc_per_node=1), at)
        with db.write() as connection:
            this = tables.jobs.update().where(tables.jobs.c.job == job)
            connection.execute(this.values(state=state.value, ended_at=ended_at, newest_step=7))
            events.append(connection, [Event(at=at + 30.0, kind=EventKind.JOB_SUBMITTED, job=job, data={})])
    finally:
        db.close()
    return supervisor.parent
