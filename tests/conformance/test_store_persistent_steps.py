"""A report of persistent steps costs the database nothing for steps that it does not keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from sqlalchemy import select, update

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, StoredPoint, Tier
from services.record.codec import dump
from services.store.reports.placements import SqlPlacements
from services.store.sql import tables

Report = Callable[..., list[str]]


@pytest.fixture
def report(sql_stores, make, statements: list[str], monkeypatch: pytest.MonkeyPatch) -> Report:
    """Reports these steps as an engine does that has all ranks' shards; returns the statements that it took. Every
    200th step of the job stays in the store for ever."""
    spec = CheckpointSpec(persistent_dir="/store", persistent_every_steps=10, persistent_keep_every=200)
    monkeypatch.setattr(make, "spec", partial(make.spec, checkpoint=spec))
    sql_stores.run_job()
    sent_at = 1010.0

    def report(*steps: int, ranks: Sequence[int] = range(4)) -> list[str]:
        nonlocal sent_at
        sent_at += 1.0
        copies = tuple(
            ShardCopy("job", 1, step, rank, Tier.PERSISTENT, "", 10, "d") for step in steps for rank in ranks
        )
        statements.clear()
        sql_stores.status.record_reports([(make.report("host-a", sent_at=sent_at, copies=copies), sent_at)])
        return [statement for statement in statements if "persistent_" in statement]

    return report


def kept_by(sql_stores) -> list[int]:
    with sql_stores.db.read() as connection:
        return sorted(connection.scalars(select(tables.persistent_steps.c.step)))


def test_what_was_forgotten_is_not_stored_again_although_older_multiples_are_kept(sql_stores, report: Report) -> None:
    expected = [400, 600, *range(640, 800, 10)]
    report(200, *expected)
    assert kept_by(sql_stores) == expected
    for pinned in (500, 630):
        received = report(200, 400, pinned, 600, 780, 790)
        assert all(statement.startswith("SELECT") for statement in received), "it was stored, and forgotten again"
        assert kept_by(sql_stores) == expected


def test_after_a_rollback_an_older_step_of_the_lineage_is_stored_however_many_newer_ones_it_lost(
    sql_stores, report: Report
) -> None:
    lost = range(640, 800, 10)
    report(400, 600, *lost)
    history = dump((LineageEntry(1, 635), LineageEntry(2)))
    with sql_stores.db.write() as connection:  # as if its next generation had begun at step 635
        connection.execute(update(tables.generations).values(lineage=history))
    report(630)
    assert 630 in kept_by(sql_stores)


def test_the_copies_of_all_steps_are_counted_at_once(report: Report) -> None:
    report(*range(10, 170, 10))
    received = report(170)
    assert sum("count(" in statement for statement in received) == 1


def test_a_sensor_knows_the_newest_step_of_all_ranks_that_is_stored(sql_stores, report: Report, statements) -> None:
    placements = SqlPlacements(sql_stores.db)
    assert placements.read().stored_points == {}
    report(10, 20)
    report(30, ranks=(0, 1, 2))
    assert placements.read().stored_points == {"job": StoredPoint(20, 1)}
    statements.clear()
    assert placements.read().stored_points == {"job": StoredPoint(20, 1)}
    assert not [statement for statement in statements if "count(" in statement], "nothing has changed"
    report(30, ranks=(3,))
    report(40, ranks=(0,))
    statements.clear()
    assert placements.read().stored_points == {"job": StoredPoint(30, 1)}
    assert sum("count(" in statement for statement in statements) == 2
    history = dump((LineageEntry(1, 25), LineageEntry(2)))
    with sql_stores.db.write() as connection:  # as if its next generation had begun at step 25
        connection.execute(update(tables.generations).values(lineage=history))
    assert SqlPlacements(sql_stores.db).read().stored_points == {"job": StoredPoint(20, 1)}
    report(40, ranks=(1, 2, 3))
    assert placements.read().stored_points == {"job": StoredPoint(20, 1)}, "which its lineage lost"


def test_a_step_is_complete_with_the_ranks_that_saved_it_whatever_the_job_has_now(sql_stores, report: Report) -> None:
    report(10, 20)
    report(30, ranks=(0, 1, 2))
    for before in (4, 0):
        history = dump((LineageEntry(1, 999, world_size=before), LineageEntry(2, world_size=2)))
        with sql_stores.db.write() as connection:
            connection.execute(update(tables.generations).values(lineage=history))
        assert SqlPlacements(sql_stores.db).read().stored_points == {"job": StoredPoint(20, 1)}
    history = dump((LineageEntry(1, 999, world_size=3), LineageEntry(2, world_size=4)))
    with sql_stores.db.write() as connection:
        connection.execute(update(tables.generations).values(lineage=history))
    assert SqlPlacements(sql_stores.db).read().stored_points == {"job": StoredPoint(30, 1)}
    for step in range(40, 300, 10):
        report(step, ranks=(0, 1, 2))
    assert kept_by(sql_stores) == list(range(140, 300, 10)), "complete ones of three ranks displace the oldest"


def test_jobs_without_that_tier_are_not_queried(sql_stores, statements) -> None:
    sql_stores.run_job()
    placements = SqlPlacements(sql_stores.db)
    statements.clear()
    assert placements.read().stored_points == placements.read().stored_points == {}
    assert not [statement for statement in statements if "persistent_" in statement]
