"""Rules that wait for news: the root cause of a lost connection, a report, a spare."""

from __future__ import annotations

import msgspec
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    LOST,
    NOW,
    SETTINGS,
    decided,
    exited,
    host,
    incident,
    rank,
    say,
    view,
    with_exit,
)

from flyball.contracts.cluster import HostState, Phase
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.reports.signals import HostReturned, HostSilent
from services.controller.round.view import JobView, RankView


def test_a_lost_connection_waits_for_its_cause() -> None:
    outcome = decide(view(), [say(LOST, source="b")], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.HOLD and decided(outcome).action is None
    (held,) = outcome.incidents
    assert held.state is IncidentState.DECIDING and held.hold_until == outcome.wake_at == NOW + 2.0
    waiting = with_exit(LOST)
    assert not decide(view(job=waiting, incidents=[held]), [], SETTINGS, NOW + 1.0).decisions
    # The cause arrives: at once.
    found = decide(view(job=waiting, incidents=[held]), [say(exited(0, exit_code=None, signal=9))], SETTINGS, NOW + 1.0)
    assert decided(found).kind is DecisionKind.RESTART_IN_PLACE
    assert found.incidents[0].cause == "worker_killed" and found.incidents[0].host_id == "a"
    # It never arrives, and every host has been heard of since.
    heard = [msgspec.structs.replace(h, last_report_at=NOW + 2.0) for h in HOSTS]
    late = decide(view(job=waiting, incidents=[held], hosts=heard), [], SETTINGS, NOW + 2.1)
    assert decided(late).kind is DecisionKind.RESTART_IN_PLACE and late.incidents[0].cause == "connection_lost"


def test_a_host_that_is_not_heard_of_is_waited_for_longer() -> None:
    (held,) = decide(view(), [say(LOST)], SETTINGS, NOW).incidents
    waiting = with_exit(LOST)
    heard = [host("a", job="job", last_report_at=NOW + 2), HOSTS[1], host("c", last_report_at=NOW + 2)]
    outcome = decide(view(job=waiting, incidents=[held], hosts=heard), [], SETTINGS, NOW + 2.1)
    assert decided(outcome).kind is DecisionKind.HOLD
    silent = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
    found = decide(view(job=waiting, incidents=outcome.incidents, hosts=heard), [silent], SETTINGS, NOW + 3)
    assert decided(found).kind is DecisionKind.MIGRATE_TO_SPARE


def test_without_a_spare_it_holds_and_looks_again() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    outcome = decide(view(hosts=HOSTS[:2]), [silent], SETTINGS, NOW)
    assert decided(outcome).rule == "wait_for_a_spare"
    assert outcome.wake_at == NOW + 1.0
    heard = host("a", job="job", last_report_at=NOW + 0.9)
    after = view(hosts=(heard, host("b", state=HostState.SILENT, job="job", since=NOW)), incidents=outcome.incidents)
    assert not decide(after, [], SETTINGS, NOW + 1).decisions
    came = msgspec.structs.replace(after, hosts=(*after.hosts, host("d")))
    assert decided(decide(came, [], SETTINGS, NOW + 1)).kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_host_that_returns_while_a_spare_is_awaited_may_go_on() -> None:
    held = incident(cause="host_silent", state=IncidentState.DECIDING, generation=2, action_id="", failed_step=50)
    back = host("b", state=HostState.SILENT, job="job", since=NOW - 8)
    returned = decide(view(hosts=(HOSTS[0], back), incidents=[held]), [say(HostReturned("b", 9.0))], SETTINGS, NOW)
    assert returned.hosts[0].state is HostState.HEALTHY
    assert decided(returned).rule == "watch_returned_hosts"
    well = (HOSTS[0], host("b", job="job", since=NOW))
    ranks = (rank(0, "a", step=51, at=NOW + 1), rank(1, "b", step=51, at=NOW + 1))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    (closed,) = decide(view(job=job, hosts=well, incidents=returned.incidents), [], SETTINGS, NOW + 1).incidents
    assert closed.state is IncidentState.RESOLVED and closed.lost_steps == 0
    stuck = decide(view(hosts=well, incidents=returned.incidents), [], SETTINGS, NOW + 2)
    assert decided(stuck).kind is DecisionKind.RESTART_IN_PLACE


RETURNED = incident(cause="host_silent", state=IncidentState.DECIDING, generation=2, action_id="", failed_step=-1)
WELL = (HOSTS[0], host("b", job="job", since=NOW))  # b has just returned


def with_ranks(*ranks: RankView) -> JobView:
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def ended(number: int, on: str, exit_code: int) -> RankView:
    body = exited(number, exit_code=exit_code, error="")
    return msgspec.structs.replace(rank(number, on), exited=body, exited_at=NOW)


def test_a_script_that_reports_no_steps_is_not_restarted_when_its_host_returns() -> None:
    def starting(at: float) -> JobView:
        return with_ranks(*(rank(n, on, step=-1, phase=Phase.STARTING, at=at) for n, on in ((0, "a"), (1, "b"))))

    waits = decide(view(job=starting(NOW), hosts=WELL, incidents=[RETURNED]), [], SETTINGS, NOW + 0.1)
    assert decided(waits).rule == "watch_returned_hosts"
    assert waits.wake_at == NOW + SETTINGS.unwatched_verify_s
    later = decide(view(job=starting(NOW + 9), hosts=WELL, incidents=waits.incidents), [], SETTINGS, NOW + 10)
    assert not later.decisions
    assert later.incidents[0].state is IncidentState.RESOLVED and later.incidents[0].lost_steps == 0
    unheard = decide(view(job=starting(NOW - 9), hosts=WELL, incidents=waits.incidents), [], SETTINGS, NOW + 10)
    assert decided(unheard).kind is DecisionKind.RESTART_IN_PLACE, "nobody has seen them since"


def test_a_job_whose_ranks_end_well_is_not_restarted_when_a_host_returns() -> None:
    job = with_ranks(ended(0, "a", 0), rank(1, "b", at=NOW + 0.1))
    waits = decide(view(job=job, hosts=WELL, incidents=[RETURNED]), [], SETTINGS, NOW + 0.1)
    assert decided(waits).rule == "watch_returned_hosts"
    both = with_ranks(ended(0, "a", 0), ended(1, "b", 0))
    done = decide(view(job=both, hosts=WELL, incidents=waits.incidents), [], SETTINGS, NOW + 1)
    assert decided(done).kind is DecisionKind.COMPLETE_JOB
    failed = with_ranks(ended(0, "a", 0), ended(1, "b", 1))
    again = decide(view(job=failed, hosts=WELL, incidents=waits.incidents), [], SETTINGS, NOW + 1)
    assert decided(again).kind is DecisionKind.RESTART_IN_PLACE
