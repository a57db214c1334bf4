"""What a report of steps on the persistent tier costs the database: nothing that it does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sqlalchemy import event, select, update

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from services.record.codec import dump
from services.store.sql import tables

Tell = Callable[..., list[str]]


@pytest.fixture
def tell(sql_stores, make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tell]:
    """Reports these steps as an engine does that has all ranks' shards; returns the statements that it took. Every
    200th step of the job stays in the store for ever."""
    spec = CheckpointSpec(persistent_dir="/store", persistent_every_steps=10, persistent_keep_every=200)
    monkeypatch.setattr(make, "spec", partial(make.spec, checkpoint=spec))
    sql_stores.run_job()
    statements: list[str] = []
    sent_at = 1010.0

    def note(_connection, _cursor, statement: str, *_more) -> None:
        statements.append(statement)

    def report(*steps: int) -> list[str]:
        nonlocal sent_at
        sent_at += 1.0
        copies = tuple(
            ShardCopy("job", 1, step, rank, Tier.PERSISTENT, "", 10, "d") for step in steps for rank in range(4)
        )
        statements.clear()
        sql_stores.status.record_reports([(make.report("host-a", sent_at=sent_at, copies=copies), sent_at)])
        return [statement for statement in statements if "persistent_" in statement]

    with sql_stores.db.write() as connection:
        engine = connection.engine
    event.listen(engine, "before_cursor_execute", note)
    yield report
    event.remove(engine, "before_cursor_execute", note)


def kept_by(sql_stores) -> list[int]:
    with sql_stores.db.read() as connection:
        return sorted(connection.scalars(select(tables.persistent_steps.c.step)))


def test_what_was_forgotten_is_not_stored_again_although_older_multiples_are_kept(sql_stores, tell: Tell) -> None:
    expected = [400, 600, *range(640, 800, 10)]
    tell(200, *expected)
    assert kept_by(sql_stores) == expected
    for pinned in (500, 630):
        told = tell(200, 400, pinned, 600, 780, 790)
        assert all(statement.startswith("SELECT") for statement in told), "it was stored, and forgotten again"
        assert kept_by(sql_stores) == expected


def test_after_a_rollback_an_older_step_of_the_history_is_stored_however_many_newer_ones_it_lost(
    sql_stores, tell: Tell
) -> None:
    lost = range(640, 800, 10)
    tell(400, 600, *lost)
    history = dump((LineageEntry(1, 635), LineageEntry(2)))
    with sql_stores.db.write() as connection:  # as if its next generation had begun at step 635
        connection.execute(update(tables.generations).values(lineage=history))
    tell(630)
    assert 630 in kept_by(sql_stores)


def test_the_copies_of_all_steps_are_counted_at_once(tell: Tell) -> None:
    tell(*range(10, 170, 10))
    told = tell(170)
    assert sum("count(" in statement for statement in told) == 1
