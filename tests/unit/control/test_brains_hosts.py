"""Hosts that return, and the superseded workers on them."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, IncidentState
from flyball.contracts.reports.signals import HostReturned
from tests.checked_rules import decide
from tests.policy_views import GENERATION, HOSTS, JOB, NOW, SETTINGS, SPEC, action, decided, host, incident, say, view


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


def test_workers_of_a_job_that_ended_are_stopped_and_its_slots_freed() -> None:
    over = msgspec.structs.replace(JOB, state=JobState.FAILED, ended_at=NOW - 60)
    back = host("a", state=HostState.SILENT, since=NOW - 90, last_report_at=NOW, stale_jobs={"job": 2})
    outcome = decide(view(job=over, hosts=(back,)), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None
    assert (plan.kind, plan.stop_hosts, plan.generation) == (DecisionKind.STOP_JOB, ("a",), 2)
    assert "of job job, which has failed" in outcome.incidents[0].message
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
