"""A name that is used again: what the job continues from, and who may record its end."""

from __future__ import annotations

import pytest

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Again, JobSpec, JobState
from services.store.decisions.job_store import SqlJobStore
from services.store.sql.database import Database
from services.store.sql.lease import ControllerLease

RUN = "20260101-000000-000"
POINT = (LineageEntry(3, 7),)
SPEC = JobSpec("job", ("train.py",), "/", 1, 1)


def test_what_a_job_should_continue_from_counts_until_it_has_begun(db: Database) -> None:
    """After Ctrl-C before its first generation, the same command again must not start at step 0."""
    store = SqlJobStore(db)
    assert store.submit(SPEC, 10.0, Again.RESUME, run=RUN, adopted=POINT)
    store.record_killed("job", 11.0)
    for now in (20.0, 30.0):
        assert store.submit(SPEC, now, Again.RESUME)
        past = store.past("job")
        assert past is not None
        assert (past.run, past.lineage) == (RUN, POINT)
        store.record_killed("job", now + 1.0)
    assert store.submit(SPEC, 40.0, Again.FRESH)
    past = store.past("job")
    assert past is not None
    assert past.lineage == ()


def test_a_job_that_somebody_supervises_was_not_killed(db: Database) -> None:
    if db.is_sqlite:
        pytest.skip("the folder that it lies in is locked by the one who uses it")
    store = SqlJobStore(db)
    store.submit(SPEC, 10.0)
    db.transact(lambda connection: ControllerLease(SystemClock()).acquire(connection, "elsewhere#1", 60.0))
    store.record_killed("job", 11.0)
    past = store.past("job")
    assert past is not None
    assert past.state is JobState.SUBMITTED
