"""Rules for a host that will be taken away at a known time."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    KILLED,
    NOTICED,
    NOW,
    SETTINGS,
    SPEC,
    action,
    decided,
    host,
    incident,
    preempted,
    rank,
    say,
    view,
)

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, IncidentState
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import PreemptionNotice
from services.controller.round.view import ActionView, DrainView

NOTICE = PreemptionNotice(NOW + 30.0, "cloud")


def test_a_notice_saves_a_named_step_first() -> None:
    outcome = decide(view(), [say(NOTICE, source="b")], SETTINGS, NOW)
    decision = decided(outcome)
    plan = decision.action
    assert plan is not None and plan.kind is DecisionKind.EMERGENCY_CHECKPOINT
    # 10 steps in 99.9 s: the next is about to come; the margin is 3.
    assert plan.emergency_step == 54 and plan.stop_hosts == ("a", "b") and plan.warm_hosts == ("c",)
    assert plan.deadline_s == pytest.approx(25.0)
    assert outcome.incidents[0].cause == "preemption_notice"
    assert outcome.hosts[0].preempt_deadline_at == NOW + 30.0


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_a_notice_counts_by_the_clock_of_its_host(skew_s: float) -> None:
    told = say(PreemptionNotice(NOW + skew_s + 29.5, "cloud"), source="b", at=NOW + skew_s - 0.5)
    outcome = decide(view(), [told], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.EMERGENCY_CHECKPOINT
    assert outcome.hosts[0].preempt_deadline_at == pytest.approx(NOW + 30.0)
    again = say(PreemptionNotice(NOW + skew_s + 29.5, "cloud"), source="b", at=NOW + skew_s + 0.5, seq=2)
    hosts = (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 30.0), HOSTS[2])
    assert not decide(view(hosts=hosts), [again], SETTINGS, NOW + 1.0).hosts


def saved(state: ActionState) -> ActionView:
    plan = ActionPlan(DecisionKind.EMERGENCY_CHECKPOINT, "job", SPEC, 2, stop_hosts=("a", "b"), emergency_step=54)
    return action(plan=plan, state=state, phase="save")


@pytest.mark.parametrize("state", [ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT])
def test_after_the_save_or_without_it_the_ranks_move(state: ActionState) -> None:
    notice = incident(cause="preemption_notice", generation=2)
    outcome = decide(view(hosts=preempted(), incidents=[notice], actions=[saved(state)]), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None and plan.kind is DecisionKind.MIGRATE_TO_SPARE and plan.next is not None
    assert [part.host_id for part in plan.next.hosts] == ["a", "c"]
    assert plan.stop_hosts == ("a", "b") and plan.next.restart_count == 1


def test_without_a_spare_training_goes_on_until_the_last_moment() -> None:
    outcome = decide(view(hosts=preempted()[:2]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.HOLD
    held = outcome.incidents
    late = decide(view(hosts=preempted()[:2], incidents=held), [], SETTINGS, NOW + 10.5)
    assert decided(late).kind is DecisionKind.EMERGENCY_CHECKPOINT


@pytest.mark.parametrize(
    ("left_s", "spares", "kind"),
    [
        (10.1, 0, DecisionKind.HOLD),
        (10.0, 0, DecisionKind.EMERGENCY_CHECKPOINT),  # twice the reserve
        (5.1, 0, DecisionKind.EMERGENCY_CHECKPOINT),
        (5.0, 0, DecisionKind.HOLD),  # too late
        (30.0, 1, DecisionKind.EMERGENCY_CHECKPOINT),
        (5.0, 1, DecisionKind.MIGRATE_TO_SPARE),
    ],
)
def test_how_much_of_a_notice_is_left_decides(left_s: float, spares: int, kind: DecisionKind) -> None:
    hosts = (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + left_s), *HOSTS[2 : 2 + spares])
    outcome = decide(view(hosts=hosts), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert decision.kind is kind
    if kind is DecisionKind.EMERGENCY_CHECKPOINT:
        assert decision.action is not None
        assert decision.action.deadline_s == pytest.approx(left_s - 5.0)
        assert ("c takes over" in decision.reason) is bool(spares)
    if kind is DecisionKind.HOLD:
        assert outcome.wake_at == pytest.approx(NOW + min(1.0, left_s - 10.0) if left_s > 10.0 else NOW + 1.0)
    (found,) = outcome.incidents
    assert found.observed_at == NOW, "the notice was taken in earlier, at an unknown time"


@pytest.mark.parametrize("state", [IncidentState.ACTING, IncidentState.VERIFYING])
def test_only_failures_and_departures_that_are_handled_come_before_a_notice(state: IncidentState) -> None:
    stale = incident(cause="superseded_workers", host_id="c", state=state, since=NOW - 1, incident_id="inc-3")
    busy = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    cleaning = ActionPlan(DecisionKind.CORDON, "job", SPEC, generation=1, stop_hosts=("c",))
    seen = {
        "hosts": (*preempted()[:2], busy, host("d")),
        "actions": [action(plan=cleaning, state=ActionState.DISPATCHED)],
    }
    outcome = decide(view(incidents=[stale, NOTICED], **seen), [], SETTINGS, NOW)  # type: ignore[arg-type]  # as named
    assert DecisionKind.EMERGENCY_CHECKPOINT in {decision.kind for decision in outcome.decisions}
    other = incident(
        cause="drain_requested", host_id="a", state=state, generation=2, incident_id="inc-3", since=NOW - 1
    )
    drained = host("a", job="job", drain=DrainView(DrainState.REQUESTED, NOW - 9, NOW + 300))
    saves = msgspec.structs.replace(saved(ActionState.DISPATCHED), incident_id="inc-3")
    seen = {"hosts": (drained, *preempted()[1:], host("d")), "actions": [saves]}
    outcome = decide(view(incidents=[other, NOTICED], **seen), [], SETTINGS, NOW)  # type: ignore[arg-type]  # as named
    held = [decision.rule for decision in outcome.decisions if decision.incident_id == NOTICED.incident_id]
    assert held == ["let_the_other_incident_go_first"]


@pytest.mark.parametrize(
    ("ran_s", "report_ago_s", "step"),
    [
        (40.0, 0.0, 90 + 1 + 3),  # 50 steps in 40 s; a quarter of a second is a third of a step
        (5.0, 0.0, 93 + 3),  # ten a second
        (5.0, 0.44, 97 + 3),
        (5.0, -2.0, 93 + 3),  # of a clock that is ahead
        (100.0, 3.02, 93 + 3),  # 0.91 steps a second, from step 0 on
    ],
)
def test_the_named_step_is_ahead_of_ranks_that_train_on(ran_s: float, report_ago_s: float, step: int) -> None:
    at = NOW - report_ago_s
    ranks = (rank(0, "a", step=90, at=at), rank(1, "b", step=88, at=at))
    restored = None if ran_s == 100.0 else 40
    generation = msgspec.structs.replace(GENERATION, ranks=ranks, started_at=at - ran_s, restore_step=restored)
    job = msgspec.structs.replace(JOB, generation=generation)
    plan = decided(decide(view(job=job, hosts=preempted()), [], SETTINGS, NOW)).action
    assert plan is not None and plan.emergency_step == step


def test_the_pace_is_that_of_steps_without_the_start_before_them() -> None:
    """Half a minute of start, then 20 steps a second."""
    ranks = (rank(0, "a", step=90, at=NOW - 0.5), rank(1, "b", step=88, at=NOW - 0.5))
    first = NOW - 0.5 - 49 / 20.0
    parts = {"ranks": ranks, "started_at": first - 30.0, "restore_step": 40, "first_step_at": first}
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, **parts))
    plan = decided(decide(view(job=job, hosts=preempted()), [], SETTINGS, NOW)).action
    assert plan is not None and plan.emergency_step == 90 + 15 + 3, "0.75 s on"


def test_the_time_of_a_notice_is_that_of_its_signal() -> None:
    told = say(PreemptionNotice(NOW + 28.0, "cloud"), source="b", at=NOW - 2.0)
    assert decide(view(), [told], SETTINGS, NOW).incidents[0].observed_at == NOW - 2.0


def test_a_failure_comes_before_a_notice_and_moves_the_ranks_too() -> None:
    notice = incident(cause="preemption_notice", generation=2)
    running = saved(ActionState.DISPATCHED)
    outcome = decide(view(hosts=preempted(), incidents=[notice], actions=[running]), [say(KILLED)], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE and decided(outcome).incident_id == "inc-7"
    assert outcome.superseded_actions == ("act-1",)


def test_a_preempted_host_without_ranks_is_cordoned() -> None:
    outcome = decide(view(hosts=(*HOSTS[:2], host("c", preempt_deadline_at=NOW + 20))), [], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.CORDONED and not outcome.decisions
