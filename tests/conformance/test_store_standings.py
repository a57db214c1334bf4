"""Hosts that are ahead of the database: how they are recognized, and what is adopted from them."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import update
from support.jobs.placements import make_placement
from support.stores.job_stores import SEALS

from flyball.contracts.cluster import HostRanks, HostState, JobState
from flyball.contracts.decisions import DecisionKind, StartWorkers
from flyball.contracts.errors import NotFound
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.signals import EngineRestarted, Signal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed, decision_number, issued_id
from services.actuator.ports import AHEAD_AGAIN_S
from services.controller.policy import decide
from services.controller.round.view import Outcome, PolicySettings
from services.controller.updates.held_jobs import IMPLAUSIBLE, WITHDRAWN_AFTER_S
from services.rules.grant_seals import whole_digest
from services.runtime.list_filters import AuditFilter
from services.runtime.paging import Page
from services.store.decisions.audit_store import SqlAuditLog
from services.store.decisions.order_store import SqlOrderStore
from services.store.decisions.standing_store import SqlStandings
from services.store.reports.status_store import read_watermarks
from services.store.sql import lease
from services.store.sql.tables import cluster

NEWEST = "act-0badcafe-40.start.host-a.1"


def standing(stores, cluster: str, **changes) -> HostStanding:  # type: ignore[no-untyped-def]  # fixtures
    spec = stores.make.spec()
    hosts = tuple(HostRanks(f"host-{name}", "10.0.0.1", "10.0.0.1:1", (rank,)) for rank, name in enumerate("ab"))
    placement = make_placement(
        {}, job=spec.job, generation=7, world_size=2, hosts=hosts, master_port=29500, run="20261123-180000-000"
    )
    values = {"obeyed": LastObeyed(cluster, 12, NEWEST), "unanswered_s": 100.0, "committed": {"i": 17}}
    seal = GrantSeal(whole=whole_digest(placement))
    body = SEALS.sealed("host-a", StartWorkers(spec, placement, seal), Fence(12, 7))
    values["jobs"] = (HeldJob(spec, placement, Fence(12, 7), (0,), seal=body.seal),)
    return HostStanding(host_id="host-a", incarnation="i", at=1.0, **(values | changes))


def round_(stores, at: float, **view_changes) -> Outcome:  # type: ignore[no-untyped-def]
    """One round of the policy, stored."""
    view = msgspec.structs.replace(stores.decisions.load_view(), **view_changes)
    outcome = decide(view, [], PolicySettings(), at)
    epoch = view.epoch
    stores.decisions.commit(epoch=epoch, now=at, signals=[], cursor=None, outcome=outcome, first_steps={})
    return outcome


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


def unsealed(stores, **changes) -> HostStanding:  # type: ignore[no-untyped-def]
    found = standing(stores, identity(stores), **changes)
    return msgspec.structs.replace(found, jobs=(msgspec.structs.replace(found.jobs[0], seal=GrantSeal()),))


def test_a_host_without_a_seal_gets_commands_and_its_job_waits_for_an_order(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    told = unsealed(stores)
    standings.record(told)
    at = clock.wall_s() + 60.0
    assert round_(stores, at).adoption is not None
    assert not standings.judge({"host-a": told.obeyed}).ahead, "it is commanded"
    view = stores.decisions.load_view()
    assert [(one.is_settled, one.is_needed, one.sealed) for one in view.standings] == [(True, True, ())]
    assert view.jobs == ()
    orders = SqlOrderStore(stores.db)
    with pytest.raises(NotFound, match="No host tells of a job 'another'"):
        orders.adopt("another", "", at)
    orders.adopt("job", "I know it", at)
    assert [job.spec.job for job in round_(stores, at + 1.0).adoption.jobs] == ["job"]
    (job,) = stores.decisions.load_view().jobs
    assert (job.state, job.generation.generation) == (JobState.RUNNING, 7)
    round_(stores, at + 2.0)
    view = stores.decisions.load_view()
    assert (view.standings, view.orders) == ((), ())


def test_a_host_whose_word_is_needed_is_asked_with_its_next_poll(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    stores.status.record_reports([(stores.make.report("host-b"), stores.make.T)])
    told = standing(stores, identity(stores))
    standings.record(told)
    outcome = round_(stores, clock.wall_s() + 5.0)
    assert [(change.host_id, change.is_needed) for change in outcome.words] == [("host-b", True)]
    nothing = LastObeyed()
    judged = standings.judge({"host-b": nothing, "host-a": told.obeyed})
    assert (judged.asked, judged.ahead) == ({"host-b"}, {"host-a"})
    assert stores.decisions.load_view().asked == ("host-b",)
    mine = msgspec.structs.replace(told, host_id="host-b", obeyed=nothing, jobs=())
    standings.record(mine)
    assert standings.judge({"host-b": nothing}).asked == set(), "once"
    assert [job.spec.job for job in round_(stores, clock.wall_s() + 6.0).adoption.jobs] == ["job"]
    round_(stores, clock.wall_s() + 7.0)
    view = stores.decisions.load_view()
    assert (view.standings, view.asked) == ((), ())


def test_a_host_that_was_settled_is_ahead_again_no_sooner_than_after_a_while(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    """Each standing raises the epoch: one host alone must not make leaders change all the time."""
    told = standing(stores, identity(stores), jobs=())
    standings.record(told)
    round_(stores, clock.wall_s() + 5.0)
    again = msgspec.structs.replace(told, obeyed=LastObeyed(told.obeyed.cluster, 40, "act-0badcafe-90.start.h.1"))
    standings.record(again)
    (one,) = stores.decisions.load_view().standings
    assert one.first_told_at == clock.wall_s() + AHEAD_AGAIN_S
    assert round_(stores, clock.wall_s() + 5.0).adoption is None


def test_what_hosts_say_is_in_the_audit_with_the_host(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    standings.record(standing(stores, identity(stores)))
    standings.record(standing(stores, identity(stores)))
    round_(stores, clock.wall_s() + 60.0)
    entries = SqlAuditLog(stores.db, clock).entries(Page(10, ""), AuditFilter())
    assert [(entry["operation"], entry["target"], entry["role"]) for entry in entries] == [
        ("report_standing", "host-a", "daemon"),
        ("adopt_job", "job", "daemon"),
    ], "a standing that says the same is no news"
    assert entries[0]["detail"]["jobs"] == ["job 7"]
    assert entries[1]["detail"]["hosts"] == ["host-a", "host-b"]


def test_a_host_that_no_longer_says_what_cannot_be_is_not_held_any_more(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    """As after the step that the incident names: its daemon began anew, and so is never asked again."""
    stores.status.record_reports([(stores.make.report("host-a"), clock.wall_s())])
    told = standing(stores, "", obeyed=LastObeyed("", 2**62, NEWEST), jobs=())
    standings.record(told)
    at = clock.wall_s()
    (opened,) = round_(stores, at).incidents
    assert (opened.cause, opened.state.closed) == (IMPLAUSIBLE, False)
    assert f"{WITHDRAWN_AFTER_S:.0f} s" in opened.message
    clock.sleep(WITHDRAWN_AFTER_S)
    standings.record(told)
    assert not round_(stores, at + WITHDRAWN_AFTER_S).withdrawn, "it says so again"
    assert [i.cause for i in stores.decisions.load_view().incidents] == [IMPLAUSIBLE]
    outcome = round_(stores, at + 2 * WITHDRAWN_AFTER_S)
    assert [(one.standing.host_id, len(outcome.words)) for one in outcome.withdrawn] == [("host-a", 0)]
    view = stores.decisions.load_view()
    assert (view.standings, view.incidents) == ((), ())
    standings.record(told)
    assert [i.cause for i in round_(stores, clock.wall_s()).incidents] == [IMPLAUSIBLE], "and it may come again"


def test_what_a_host_says_again_meanwhile_is_kept(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    stores.status.record_reports([(stores.make.report("host-a"), clock.wall_s())])
    told = standing(stores, "", obeyed=LastObeyed("", 2**62, NEWEST), jobs=())
    standings.record(told)
    view = stores.decisions.load_view()
    outcome = decide(view, [], PolicySettings(), clock.wall_s() + WITHDRAWN_AFTER_S)
    assert outcome.withdrawn
    clock.sleep(1.0)
    standings.record(told)
    stores.decisions.commit(
        epoch=view.epoch, now=clock.wall_s(), signals=[], cursor=None, outcome=outcome, first_steps={}
    )
    assert len(stores.decisions.load_view().standings) == 1


def test_a_silent_host_may_say_so_still(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    stores.status.record_reports([(stores.make.report("host-a"), clock.wall_s())])
    standings.record(standing(stores, "", obeyed=LastObeyed("", 2**62, NEWEST), jobs=()))
    hosts = tuple(msgspec.structs.replace(host, state=HostState.SILENT) for host in stores.decisions.load_view().hosts)
    assert not round_(stores, clock.wall_s() + 9 * WITHDRAWN_AFTER_S, hosts=hosts).withdrawn


def test_numbers_that_no_supervisor_counted_do_not_end_the_loop(stores, standings, clock) -> None:  # type: ignore[no-untyped-def]
    """Neither those that a host tells, nor those that an earlier release stored."""
    standings.record(
        standing(stores, "", obeyed=LastObeyed("", 2**62, f"act-deadbeef-{10**18 - 1}.start.h.1"), jobs=())
    )
    outcome = round_(stores, clock.wall_s() + 5.0)
    assert outcome.adoption is None and {i.cause for i in outcome.incidents} == {"standing_implausible"}
    with stores.db.write() as connection:
        connection.execute(update(cluster).values(decision_floor=2**63 - 1))
    view = stores.decisions.load_view()
    assert view.next_decision == 2, "the number of its own last decision counts"
    with stores.db.write() as connection:
        connection.execute(update(cluster).values(decision_floor=10**18 - 1))
    stores.jobs.submit(stores.make.spec(), clock.wall_s())
    assert stores.decisions.load_view().next_decision == 10**18
    round_(stores, clock.wall_s() + 61.0)
