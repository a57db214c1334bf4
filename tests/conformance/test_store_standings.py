"""Hosts that are ahead of the database: how they are recognized, and what is adopted from them."""

from __future__ import annotations

import pytest
from support.jobs.placements import make_placement

from flyball.contracts.cluster import HostRanks, JobState
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.identity import Fence
from flyball.contracts.reports.signals import EngineRestarted, Signal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed, decision_number, issued_id
from services.controller.policy import decide
from services.controller.round.view import PolicySettings
from services.store.decisions.standing_store import SqlStandings
from services.store.reports.status_store import read_watermarks
from services.store.sql import lease

NEWEST = "act-0badcafe-40.start.host-a.1"


def standing(stores, cluster: str, **changes) -> HostStanding:  # type: ignore[no-untyped-def]  # fixtures
    spec = stores.make.spec()
    hosts = tuple(HostRanks(f"host-{name}", "10.0.0.1", "10.0.0.1:1", (rank,)) for rank, name in enumerate("ab"))
    placement = make_placement(
        {}, job=spec.job, generation=7, world_size=2, hosts=hosts, master_port=29500, run="20261123-180000-000"
    )
    values = {"obeyed": LastObeyed(cluster, 12, NEWEST), "unanswered_s": 100.0, "committed": {"i": 17}}
    values["jobs"] = (HeldJob(spec, placement, Fence(12, 7), (0,)),)
    return HostStanding(host_id="host-a", incarnation="i", at=1.0, **(values | changes))


def identity(stores) -> str:  # type: ignore[no-untyped-def]
    return str(stores.decisions.load_view().cluster)


@pytest.fixture
def standings(stores, clock) -> SqlStandings:  # type: ignore[no-untyped-def]
    stores.lead()
    return SqlStandings(stores.db, clock)


def test_a_host_is_ahead_that_obeyed_what_the_database_does_not_know(stores, standings) -> None:  # type: ignore[no-untyped-def]
    mine = identity(stores)
    obeyed = {
        "nobody": LastObeyed(),
        "unknown-command": LastObeyed(mine, 1, NEWEST),
        "newer-epoch": LastObeyed(mine, 2, ""),
        "other-cluster": LastObeyed("another", 1, ""),
        "old-release": LastObeyed("", 1, ""),
    }
    assert standings.judge(obeyed).ahead == {"unknown-command", "newer-epoch", "other-cluster"}


def test_what_a_host_runs_is_adopted_with_counters_above_all_that_it_saw(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    mine = identity(stores)
    standings.record(standing(stores, mine))
    view = stores.decisions.load_view()
    assert [one.standing.host_id for one in view.standings] == ["host-a"]
    outcome = decide(view, [], PolicySettings(), clock.wall_s() + 60.0)
    stores.decisions.commit(epoch=1, now=clock.wall_s(), signals=[], cursor=None, outcome=outcome, first_steps={})
    with stores.db.read() as connection:
        assert lease.current(connection).epoch == 13
    view = stores.decisions.load_view()
    assert not view.standings
    assert view.next_decision == 41
    [job] = view.jobs
    assert (job.state, job.generation.generation, job.generation.started_at > 0.0) == (JobState.RUNNING, 7, True)
    assert {d.kind for d in outcome.decisions} == {DecisionKind.ADOPT}
    obeyed = LastObeyed(mine, 12, NEWEST)
    assert not standings.judge({"host-a": obeyed}).ahead  # it is settled
    assert standings.judge({"host-b": obeyed}).ahead
    with stores.db.read() as connection:
        assert read_watermarks(connection, [("host-a", "i")]) == {("host-a", "i"): 17}


def test_a_command_of_another_incarnation_is_another_command() -> None:
    one, other = issued_id("act-17.stop.host-a.1", "1111"), issued_id("act-17.stop.host-a.1", "2222")
    assert one != other
    assert decision_number(one) == decision_number(other) == decision_number("act-17.stop.host-a.1") == 17
    assert decision_number("") == decision_number("nonsense") == 0


def test_signals_that_a_host_cannot_send_again_are_not_waited_for(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    """A database lost the seqs up to 17, and nothing else about the host."""
    later = Signal("host-a", "i", 18, clock.wall_s(), EngineRestarted("later"))
    view = stores.decisions.load_view()
    outcome = decide(view, [later], PolicySettings(), clock.wall_s())
    stores.decisions.commit(epoch=1, now=clock.wall_s(), signals=[later], cursor=None, outcome=outcome, first_steps={})
    with stores.db.read() as connection:
        assert read_watermarks(connection, [("host-a", "i")]) == {}
    standings.record(standing(stores, identity(stores), obeyed=LastObeyed(), jobs=()))
    with stores.db.read() as connection:
        assert read_watermarks(connection, [("host-a", "i")]) == {("host-a", "i"): 18}
    assert not stores.decisions.load_view().standings  # otherwise it knows everything that the host does
