"""A name that is used again: what the job continues from, and who may record its end."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import insert, select, update
from support.stores.job_stores import Stores
from support.stores.made_values import Make

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Again, JobSpec, JobState
from services.record.codec import dump
from services.store.decisions.job_store import SqlJobStore
from services.store.read.read_models import SqlReadModels
from services.store.sql import tables
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


def test_a_resumed_job_is_as_old_as_its_newest_command_and_its_run_stays(sql_stores: Stores, make: Make) -> None:
    """Else `flyball ls` and `flyball status` count the pause between two commands of a person."""
    sql_stores.run_job()
    reads = SqlReadModels(sql_stores.db)
    run = sql_stores.decisions.load_view().jobs[0].run
    began_at = reads.job("job")["started_at"]
    again_at = make.T + 500.0
    with sql_stores.db.write() as connection:
        connection.execute(update(tables.jobs).values(state=JobState.STOPPED.value, ended_at=make.T + 20.0))
    assert sql_stores.jobs.submit(make.spec(), again_at, Again.RESUME)
    assert sql_stores.jobs.past("job").run == sql_stores.decisions.load_view().jobs[0].run == run
    assert reads.job("job")["submitted_at"] == again_at
    with sql_stores.db.write() as connection:
        row = dict(connection.execute(select(tables.generations)).first()._mapping)
        connection.execute(insert(tables.generations).values(row | {"generation": 2, "started_at": again_at + 1.0}))
    assert (began_at, reads.job("job")["started_at"]) == (row["started_at"], again_at + 1.0)


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


def test_another_number_of_ranks_resumes_and_the_history_says_how_many_saved_it(db: Database) -> None:
    """Of a job that was submitted with 4 ranks, and then never began with 2, the steps are those of 4 ranks."""
    store = SqlJobStore(db)
    four, two = (msgspec.structs.replace(SPEC, nproc_per_node=ranks) for ranks in (4, 2))
    assert store.submit(four, 10.0, Again.RESUME, run=RUN, adopted=POINT)
    store.record_killed("job", 11.0)
    for now, spec in ((20.0, two), (30.0, four), (40.0, two)):
        assert store.submit(spec, now, Again.RESUME)
        past = store.past("job")
        assert past is not None
        assert past.lineage == (LineageEntry(3, 7, world_size=4),)
        store.record_killed("job", now + 1.0)


def test_a_history_from_before_numbers_of_ranks_were_noted_has_them_when_the_job_gets_others(
    sql_stores: Stores, make: Make
) -> None:
    sql_stores.run_job()  # four ranks, and its lineage does not say so
    with sql_stores.db.write() as connection:
        connection.execute(update(tables.jobs).values(run=RUN))
        plan = msgspec.structs.replace(make.grant(), run=RUN, parent_lineage=(LineageEntry(0),))
        connection.execute(update(tables.generations).values(plan=dump(plan)))
    for now, ranks in ((20.0, 1), (30.0, 3)):
        sql_stores.decisions.load_view()  # the plan is known before it changes
        with sql_stores.db.write() as connection:
            connection.execute(update(tables.jobs).values(state=JobState.STOPPED.value, ended_at=make.T + now))
        assert sql_stores.jobs.submit(make.spec(nproc_per_node=ranks), make.T + now + 1.0, Again.RESUME)
        past = sql_stores.jobs.past("job")
        assert past is not None
        assert past.lineage == (LineageEntry(1, world_size=4),)
    (view,) = sql_stores.decisions.load_view().jobs
    assert view.before is not None
    assert view.before.lineage == (LineageEntry(1, world_size=4),)
    assert view.before.parent_lineage == (LineageEntry(0, world_size=4),), "the changed plan is read again"
