"""Hosts that return, and the superseded workers on them."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    NOW,
    SAVED,
    SETTINGS,
    SPEC,
    action,
    decided,
    host,
    incident,
    say,
    view,
)

from flyball.contracts.cluster import HostRanks, HostState, JobState
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, IncidentState
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import HostReturned
from services.controller.round.view import DrainView, HostView, StandingCondition, View


def test_a_returned_host_is_a_spare() -> None:
    gone = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70)
    outcome = decide(view(hosts=(*HOSTS[:2], gone)), [say(HostReturned("c", 70.0), source="sensor.1")], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.SPARE
    unsaid = msgspec.structs.replace(gone, last_report_at=NOW)
    assert decide(view(hosts=(*HOSTS[:2], unsaid)), [], SETTINGS, NOW).hosts[0].state is HostState.SPARE


@pytest.mark.parametrize(("deadline_at", "after"), [(NOW - 5, 0.0), (NOW, 0.0), (NOW + 5, None), (0.0, None)])
def test_a_notice_is_over_if_its_host_returns_after_it(deadline_at: float, after: float | None) -> None:
    gone = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70, preempt_deadline_at=deadline_at)
    outcome = decide(view(hosts=(*HOSTS[:2], gone)), [say(HostReturned("c", 70.0), source="sensor.1")], SETTINGS, NOW)
    assert outcome.hosts[0].preempt_deadline_at == after


def test_superseded_workers_are_stopped_before_a_host_is_a_spare() -> None:
    back = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW, stale_jobs={"job": 1})
    outcome = decide(view(hosts=(*HOSTS[:2], back)), [], SETTINGS, NOW)
    busy = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    open_ = msgspec.structs.replace(outcome.incidents[0], state=IncidentState.DECIDING, action_id="")
    waits = decide(view(hosts=(*HOSTS[:2], back), incidents=[open_], actions=[busy]), [], SETTINGS, NOW)
    assert (decided(waits).rule, decided(waits).action) == ("stop_superseded_workers", None)
    plan = decided(outcome).action
    assert plan is not None
    assert (plan.kind, plan.stop_hosts, plan.generation, plan.next) == (DecisionKind.CORDON, ("c",), 1, None)
    assert outcome.hosts[0].state is HostState.IN_REPAIR
    clean = host("c", state=HostState.IN_REPAIR)
    done = action(plan=plan, state=ActionState.SUCCEEDED, action_id="act-70")
    after = decide(view(hosts=(*HOSTS[:2], clean), incidents=outcome.incidents, actions=[done]), [], SETTINGS, NOW)
    assert after.hosts[0].state is HostState.SPARE
    assert after.incidents[0].state is IncidentState.RESOLVED


@pytest.mark.parametrize(
    ("state", "found", "after_s", "ends"),
    [
        (IncidentState.ACTING, None, 10.0, IncidentState.ACTING),  # and decided again, at once
        (IncidentState.ACTING, ActionState.DISPATCHED, 10.0, None),
        (IncidentState.ACTING, ActionState.SUCCEEDED, 10.0, IncidentState.VERIFYING),
        (IncidentState.ACTING, ActionState.FAILED, 10.0, IncidentState.ACTING),
        (IncidentState.VERIFYING, ActionState.SUCCEEDED, 10.0, None),
        (IncidentState.VERIFYING, ActionState.SUCCEEDED, 31.0, IncidentState.ACTING),
    ],
)
def test_superseded_workers_are_followed_until_they_are_gone(
    state: IncidentState, found: ActionState | None, after_s: float, ends: IncidentState | None
) -> None:
    stale = incident(cause="superseded_workers", host_id="c", state=state, since=NOW - after_s)
    held = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    plan = ActionPlan(DecisionKind.CORDON, "job", SPEC, generation=1, stop_hosts=("c",))
    actions = [action(plan=plan, state=found)] if found is not None else []
    outcome = decide(view(hosts=(*HOSTS[:2], held), incidents=[stale], actions=actions), [], SETTINGS, NOW)
    assert [changed.state for changed in outcome.incidents] == ([] if ends is None else [ends])


def test_workers_that_are_superseded_in_an_old_report_only_may_be_gone() -> None:
    since = NOW - 1.0
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, started_at=since))
    left = host("c", last_report_at=NOW + 4, stored_report_at=since + 1, stale_jobs={"job": 1})
    assert not decide(view(job=job, hosts=(*HOSTS[:2], left)), [], SETTINGS, NOW + 4).incidents
    stored = msgspec.structs.replace(left, stored_report_at=NOW + 4)
    (found,) = decide(view(job=job, hosts=(*HOSTS[:2], stored)), [], SETTINGS, NOW + 4).incidents
    assert found.cause == "superseded_workers"


def moving_to_c(left: HostView, *, stopped: bool = True, since: float = NOW - 1) -> View:
    """Generation 3 has not started: c, which takes the ranks of b, is lost. `stopped`: b was asked to stop."""
    hosts = (HostRanks("a", "10.0.0.1", "a:7", (0,)), HostRanks("c", "10.0.0.1", "c:7", (1,)))
    generation = msgspec.structs.replace(GENERATION, generation=3, hosts=hosts, ranks=(), started_at=0.0)
    plan = ActionPlan(DecisionKind.MIGRATE_TO_SPARE, "job", SPEC, 2, stop_hosts=("a", "b") if stopped else ("a",))
    return view(
        job=msgspec.structs.replace(JOB, generation=generation),
        hosts=(HOSTS[0], left, host("c", job="job", state=HostState.SILENT, since=NOW - 20, last_report_at=NOW - 40)),
        incidents=[incident(cause="host_silent", host_id="c", state=IncidentState.DECIDING, since=since, generation=3)],
        actions=[action(plan=plan, state=ActionState.FAILED, phase="stop")],
        copies=SAVED,
    )


def test_ranks_return_to_a_host_that_was_left_if_their_spare_is_lost_before_they_were_stopped_there() -> None:
    """Simulator seed 4082: a full disk kept the host from stopping them, and nothing else was free."""
    warned = StandingCondition(HostCondition("ecc", Severity.WARNING, "ECC errors", "probe ecc", NOW - 5))
    left = host("b", stale_jobs={"job": 2}, conditions=(warned,))
    decision = decided(decide(moving_to_c(left), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "return_to_a_host_that_was_left")
    plan = decision.action
    assert plan is not None and plan.next is not None
    assert [part.host_id for part in plan.next.hosts] == ["a", "b"] and "b" in plan.stop_hosts


def test_a_drain_of_such_a_host_is_refused() -> None:
    """They had parked for another reason, so there is no incident of the drain."""
    asked = DrainView(DrainState.REQUESTED, NOW - 1, NOW + 299)
    outcome = decide(moving_to_c(host("b", stale_jobs={"job": 2}, drain=asked)), [], SETTINGS, NOW)
    assert decided(outcome).rule == "take_a_drained_host_back"
    (back,) = [change for change in outcome.hosts if change.host_id == "b"]
    assert back.ended_drain == asked


@pytest.mark.parametrize(
    "left",
    [
        host("b", stale_jobs={"job": 2}, preempt_deadline_at=NOW + 60),
        host("b", stale_jobs={"job": 2}, state=HostState.CORDONED),
        host("b", stale_jobs={"other": 2}),
    ],
    ids=["about to go", "cordoned", "another job's"],
)
def test_ranks_do_not_return_to_a_host_that_cannot_have_them(left: HostView) -> None:
    outcome = decide(moving_to_c(left), [], SETTINGS, NOW)
    assert "wait_for_a_spare" in [decision.rule for decision in outcome.decisions]


@pytest.mark.parametrize(("state", "since"), [(HostState.IN_REPAIR, NOW - 20), (HostState.HEALTHY, NOW - 1)])
def test_a_generation_that_lacks_a_host_does_not_wait_for_one_that_only_strays_keep_busy(
    state: HostState, since: float
) -> None:
    """Its own start would stop them, and never comes. If they were found just now, the stop may be on its way."""
    left = host("b", stale_jobs={"job": 2}, state=state)
    outcome = decide(moving_to_c(left, stopped=False, since=since), [], SETTINGS, NOW)
    rules = [decision.rule for decision in outcome.decisions]
    assert ("stop_superseded_workers" in rules) == (since < NOW - 2)
    assert "wait_for_a_spare" in rules


def test_workers_of_a_job_that_ended_are_stopped_and_its_slots_freed() -> None:
    over = msgspec.structs.replace(JOB, state=JobState.FAILED, ended_at=NOW - 60)
    back = host("a", state=HostState.SILENT, since=NOW - 90, last_report_at=NOW, stale_jobs={"job": 2})
    outcome = decide(view(job=over, hosts=(back,)), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None
    assert (plan.kind, plan.stop_hosts, plan.generation) == (DecisionKind.STOP_JOB, ("a",), 2)
    assert not outcome.jobs  # it stays as it ended
    clean = host("a", state=HostState.IN_REPAIR)
    done = action(plan=plan, state=ActionState.SUCCEEDED, action_id="act-70")
    after = decide(view(job=over, hosts=(clean,), incidents=outcome.incidents, actions=[done]), [], SETTINGS, NOW + 1)
    assert after.hosts[0].state is HostState.SPARE
    assert after.incidents[0].state is IncidentState.RESOLVED


def test_the_hosts_of_a_job_that_has_just_ended_are_left_to_its_own_action() -> None:
    over = msgspec.structs.replace(JOB, state=JobState.FAILED, ended_at=NOW - 5)
    hosts = (host("a", stale_jobs={"job": 2}), host("b", stale_jobs={"job": 2}))
    assert decide(view(job=over, hosts=hosts), [], SETTINGS, NOW).empty


def test_each_host_with_superseded_workers_is_found_whoever_else_cannot_be_asked() -> None:
    lost = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70, stale_jobs={"job": 1})
    early = host("d", stale_jobs={"job": 1}, last_report_at=JOB.generation.started_at + 2.0)  # type: ignore[union-attr]  # it runs
    stale = (host(name, stale_jobs={"job": 1}) for name in "ef")
    outcome = decide(view(hosts=(*HOSTS[:2], lost, early, *stale)), [], SETTINGS, NOW)
    assert [found.host_id for found in outcome.incidents] == ["e", "f"]
    assert {(found.generation, found.observed_at) for found in outcome.incidents} == {(1, NOW)}


def test_superseded_workers_that_cannot_be_stopped_cordon_the_host() -> None:
    stuck = incident(
        cause="superseded_workers",
        host_id="c",
        generation=1,
        state=IncidentState.DECIDING,
        decisions_made=8,
        action_id="",
    )
    bad = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    outcome = decide(view(hosts=(*HOSTS[:2], bad), incidents=[stuck]), [], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.CORDONED
    assert outcome.incidents[0].state is IncidentState.ESCALATED
    assert not outcome.jobs  # the job goes on
