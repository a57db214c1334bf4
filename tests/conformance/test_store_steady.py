"""Positions of hosts that report nothing else are stored together, and every reader sees what rows would have told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event, select

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import Phase, RankStatus
from services.controller.ports import BrokenOff
from services.store.reports import steady_reports
from services.store.reports.rank_rows import known_ranks
from services.store.reports.status_store import SqlStatusStore
from services.store.reports.steady_documents import SteadyDocuments
from services.store.sql import tables

RANKS = {"host-a": (0, 1), "host-b": (2, 3)}


def reported(make, host: str, at: float, step: int, *, phase: Phase = Phase.STEP, ranks=None, **changes):
    statuses = tuple(RankStatus("job", 1, rank, 100, phase, step, 0.0) for rank in ranks or RANKS[host])
    return make.report(host, sent_at=at, ranks=statuses, **changes), at


def seen(stores) -> dict[int, tuple[int, float]]:
    ranks = stores.decisions.load_view().jobs[0].generation.ranks
    return {rank.rank: (rank.step, rank.reported_at) for rank in ranks}


@pytest.fixture
def running(sql_stores, make):
    sql_stores.run_job()
    sql_stores.status.record_steady([reported(make, host, 1010.0, 5) for host in RANKS])
    return sql_stores


def test_newer_positions_write_no_row_and_are_seen_at_once(running, make) -> None:
    with running.db.read() as connection:
        rows = connection.execute(select(tables.host_reports)).all()
    running.status.record_steady([reported(make, host, 1011.0, 6) for host in RANKS])
    with running.db.read() as connection:
        assert connection.execute(select(tables.host_reports)).all() == rows
        ranks = known_ranks(connection, {"job": 1}, {"job": RANKS})["job"]
    assert {rank: (one.step, one.reported_at) for rank, one in ranks.items()} == seen(running)
    assert seen(running) == dict.fromkeys(range(4), (6, 1011.0))
    view = running.decisions.load_view()
    assert [(host.stored_report_at, host.last_report_at) for host in view.hosts] == [(1011.0, 1011.0)] * 2
    assert view.jobs[0].newest_step == 6
    assert view == running.other_decisions().load_view()


def test_when_ranks_moved_last_is_told_with_their_steps(running, make) -> None:
    def moved_at() -> set[float]:
        with running.db.read() as connection:
            return {one.moved_at for one in known_ranks(connection, {"job": 1}, {"job": RANKS})["job"].values()}

    assert moved_at() == {1010.0}
    running.status.record_steady([reported(make, host, 1011.0, 6) for host in RANKS])
    assert moved_at() == {1011.0}


def test_a_sensors_clock_that_is_set_back_holds_no_position_back(running, make) -> None:
    running.status.record_steady([reported(make, "host-a", 1011.0, 6)])
    report, _ = reported(make, "host-a", 1012.0, 7)
    running.status.record_steady([(report, 1000.0)])
    assert seen(running)[0] == (7, 1000.0)


def test_a_read_that_is_broken_off_takes_in_nothing(running, make) -> None:
    class BreaksOff:
        """A connection on which only the first document can be read."""

        def __init__(self, connection) -> None:
            self.connection, self.left = connection, 2

        def execute(self, statement):
            self.left -= 1
            if self.left < 0:
                raise BrokenOff
            return self.connection.execute(statement)

    running.status.record_steady([reported(make, host, 1011.0, 6) for host in RANKS])
    documents = SteadyDocuments()
    with running.db.read() as connection:
        everything = {entry.host_id for entry in SteadyDocuments().read(connection)}
        with pytest.raises(BrokenOff):
            documents.read(BreaksOff(connection))
        assert {entry.host_id for entry in documents.read(connection)} == everything == {*RANKS}


def test_positions_of_many_hosts_take_the_statements_of_one(running, make) -> None:
    statements: list[str] = []
    event.listen(running.db._writer, "before_cursor_execute", lambda *args: statements.append(args[2]))
    counts = []
    for hosts in (["host-a"], list(RANKS)):
        statements.clear()
        running.status.record_steady([reported(make, host, 1011.0 + len(hosts), 6) for host in hosts])
        counts.append(len(statements))
    assert counts[0] == counts[1] < 12


def test_whoever_rewrites_a_row_makes_its_newer_positions_void(running, make) -> None:
    running.status.record_steady([reported(make, host, 1011.0, 6) for host in RANKS])
    other = SqlStatusStore(running.db)
    other.record_reports([reported(make, "host-a", 1012.0, 7, phase=Phase.CHECKPOINT)])
    assert seen(running) == {0: (7, 1012.0), 1: (7, 1012.0), 2: (6, 1011.0), 3: (6, 1011.0)}
    running.status.record_steady([reported(make, "host-a", 1013.0, 8)])
    assert seen(running)[0] == (8, 1013.0), "the first sensor sees that its row is another one"


def test_a_rank_that_ends_keeps_the_step_that_was_stored_together(running, make) -> None:
    running.status.record_steady([reported(make, "host-a", 1011.0, 9)])
    SqlStatusStore(running.db).record_steady([reported(make, "host-a", 1012.0, 10, ranks=(0,))])
    assert (seen(running)[0], seen(running)[1]) == ((10, 1012.0), (9, 1011.0))


def test_a_row_that_other_readers_know_is_written_anew_in_time(running, make) -> None:
    received_at = select(tables.host_reports.c.received_at).where(tables.host_reports.c.host_id == "host-a")
    for at, written_at in ((1100.0, 1010.0), (1010.0 + steady_reports.REWRITE_AFTER_S, None)):
        running.status.record_steady([reported(make, "host-a", at, int(at))])
        with running.db.read() as connection:
            assert connection.scalar(received_at) == (written_at or at)
    assert seen(running)[0] == (1610, 1610.0)


def test_a_report_that_names_what_was_never_granted_is_looked_at_each_time(sql_stores, make) -> None:
    report, at = reported(make, "host-a", 1010.0, 5)
    sql_stores.status.record_steady([(report, at)])
    sql_stores.run_job()
    later = msgspec.structs.replace(report, sent_at=1011.0)
    sql_stores.status.record_steady([(later, 1011.0)])
    assert seen(sql_stores)[0] == (5, 1011.0)


changes = st.tuples(
    st.sampled_from(sorted(RANKS)),
    st.integers(0, 1),  # sensor
    st.sampled_from(["step", "step", "step", "save", "evaluation", "one rank", "copy", "late", "restarted", "again"]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(changes, max_size=20))
def test_views_are_the_same_whichever_way_reports_are_stored(new_stores, make, turns) -> None:
    together, by_row = new_stores(), new_stores()
    for stores in (together, by_row):
        stores.run_job()
    sensors = [together.status, SqlStatusStore(together.db)]
    incarnations: dict[str, int] = {}
    for number, (host, sensor, kind) in enumerate(turns, 1):
        at, more = make.T + 10.0 + number, {}
        if kind == "restarted":
            incarnations[host] = incarnations.get(host, 0) + 1
            more["succeeds"] = f"daemon-{host}-{incarnations[host] - 1}"
        more["incarnation"] = f"daemon-{host}-{incarnations.get(host, 0)}"
        phase = {"save": Phase.CHECKPOINT, "evaluation": Phase.EVAL}.get(kind, Phase.STEP)
        ranks = RANKS[host][:1] if kind == "one rank" else RANKS[host]
        if kind == "copy":
            more["copies"] = (ShardCopy("job", 1, number, 0, Tier.PERSISTENT, "", 1, "d"),)
        sent_at = at - 1.5 if kind == "late" else at
        report, _ = reported(make, host, sent_at, number, phase=phase, ranks=ranks, **more)
        for _ in range(2 if kind == "again" else 1):
            sensors[sensor].record_steady([(report, at)])
            by_row.status.record_reports([(report, at)])
        if number % 3 == 0:
            assert together.decisions.load_view() == by_row.decisions.load_view()
    assert together.decisions.load_view() == by_row.decisions.load_view() == together.other_decisions().load_view()
