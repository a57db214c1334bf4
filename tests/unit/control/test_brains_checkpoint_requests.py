"""An operator requests a checkpoint of a job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    JOB,
    KILLED,
    NOW,
    SAVED,
    SETTINGS,
    SPEC,
    STOPPED,
    action,
    decided,
    host,
    rank,
    say,
    submitted,
    view,
)

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, Incident, IncidentState
from flyball.contracts.orders import Order, OrderKind, OrderState
from flyball.contracts.reports.drains import DrainState
from services.controller.round.view import ActionView, DrainView, Outcome, PolicySettings, View

HOLD, RESUME, SAVE = DecisionKind.HOLD, DecisionKind.RESUME, DecisionKind.EMERGENCY_CHECKPOINT
ORDER = Order(OrderKind.CHECKPOINT, "job", NOW - 1, "before the firmware")


def seen(*orders: Order, **more: Any) -> View:  # noqa: ANN401 - of the view
    return msgspec.structs.replace(view(copies=SAVED, **more), orders=orders)


def requested(**more: Any) -> Incident:  # noqa: ANN401 - of Incident
    facts: dict[str, Any] = {
        "incident_id": "inc-1",
        "job": "job",
        "host_id": "",
        "cause": "checkpoint_requested",
        "state": IncidentState.DECIDING,
        "opened_at": NOW - 5,
        "since": NOW - 5,
        "message": "An operator requested a checkpoint of job job.",
        "generation": 2,
        "failed_step": 50,
    }
    return Incident(**{**facts, **more})


def saved(**more: Any) -> ActionView:  # noqa: ANN401 - of ActionView
    plan = ActionPlan(SAVE, "job", SPEC, 2, stop_hosts=("a", "b"), emergency_step=54)
    return action(**{"plan": plan, "phase": "flush", "restore_step": None, "message": "step 54 is saved", **more})


def after_save(**more: Any) -> Outcome:  # noqa: ANN401 - of ActionView
    parked = requested(action_id="act-1", decisions_made=1)
    return decide(seen(incidents=[parked], actions=[saved(**more)]), [], SETTINGS, NOW)


def test_all_ranks_save_a_named_step() -> None:
    outcome = decide(seen(ORDER), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (SAVE, "save_on_request")
    plan = decision.action
    assert plan is not None and plan.emergency_step > 50 and plan.stop_hosts == ("a", "b")
    assert [(change.order, change.state) for change in outcome.orders] == [(ORDER, OrderState.OVER)]
    (incident,) = outcome.incidents
    assert (incident.cause, incident.state) == ("checkpoint_requested", IncidentState.ACTING)


def test_a_repetition_is_part_of_the_open_incident() -> None:
    outcome = decide(seen(ORDER, incidents=[requested()]), [], SETTINGS, NOW)
    assert [incident.incident_id for incident in outcome.incidents] == ["inc-1"]
    assert decided(outcome).kind is SAVE


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (submitted(), "job job does not run"),
        (msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, job="other")), "job job does not run"),
        (
            msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(every_steps=0))),
            "job job saves no checkpoints",
        ),
    ],
)
def test_a_job_that_cannot_save_refuses_the_order(job: Any, why: str) -> None:  # noqa: ANN401 - a JobView
    outcome = decide(seen(ORDER, job=job), [], SETTINGS, NOW)
    assert [(change.state, change.message) for change in outcome.orders] == [(OrderState.REFUSED, why)]
    assert not [incident for incident in outcome.incidents if incident.cause == "checkpoint_requested"]


def test_a_request_that_waited_behind_another_incident_is_carried_out_then() -> None:
    waited = requested(opened_at=NOW - 10 * SETTINGS.action_deadline_s)
    assert decided(decide(seen(incidents=[waited]), [], SETTINGS, NOW)).rule == "save_on_request"


@pytest.mark.parametrize("message", ["step 54 is saved", ""])
def test_ranks_train_on_after_the_save(message: str) -> None:
    decision = decided(after_save(message=message))
    assert (decision.kind, decision.rule) == (RESUME, "train_on_after_the_save")


@pytest.mark.parametrize("state", [ActionState.FAILED, ActionState.TIMED_OUT])
def test_ranks_that_cannot_save_are_released_and_not_asked_again(state: ActionState) -> None:
    outcome = after_save(state=state, message="b could not save")
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (RESUME, "give_up_after_a_failed_save")
    assert outcome.incidents[-1].state is IncidentState.ESCALATED


def starting() -> Any:  # noqa: ANN401 - a JobView
    ranks = (rank(0, "a"), rank(1, "b", phase=Phase.STARTING))
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def test_ranks_that_start_are_waited_for_but_not_for_ever() -> None:
    held = decided(decide(seen(ORDER, job=starting()), [], SETTINGS, NOW))
    assert (held.kind, held.rule) == (HOLD, "wait_until_all_ranks_step")
    late = requested(opened_at=NOW - SETTINGS.action_deadline_s)
    often = requested(decisions_made=SETTINGS.max_decisions_per_incident)
    for given_up in (late, often):
        outcome = decide(seen(job=starting(), incidents=[given_up]), [], SETTINGS, NOW)
        assert decided(outcome).rule == "give_up_after_a_failed_save"
        assert outcome.incidents[-1].state is IncidentState.ESCALATED


def test_another_action_of_the_job_ends_first() -> None:
    growing = msgspec.structs.replace(requested(action_id="act-2"), incident_id="inc-2", cause="room_to_grow")
    growing = msgspec.structs.replace(growing, state=IncidentState.ACTING)
    other = saved(action_id="act-2", decision_id="dec-2", incident_id="inc-2", state=ActionState.ACKNOWLEDGED)
    outcome = decide(seen(ORDER, incidents=[growing], actions=[other]), [], SETTINGS, NOW)
    assert (decided(outcome).kind, decided(outcome).rule) == (HOLD, "wait_for_the_other_action")
    assert not outcome.superseded_actions


def test_a_failure_and_a_drain_go_first() -> None:
    outcome = decide(seen(ORDER), [say(KILLED)], SETTINGS, NOW)
    assert {d.rule for d in outcome.decisions if d.action is not None} == {"restart_in_place"}
    drained = host("b", job="job", drain=DrainView(DrainState.REQUESTED, NOW - 1, NOW + 1800))
    outcome = decide(seen(ORDER, hosts=(host("a", job="job"), drained, host("c"))), [], SETTINGS, NOW)
    assert [d.kind for d in outcome.decisions if d.action is not None] == [SAVE]


def test_a_new_generation_and_the_end_of_the_job_end_the_matter() -> None:
    (closed,) = decide(seen(incidents=[requested(generation=1)]), [], SETTINGS, NOW).incidents
    assert closed.state is IncidentState.RESOLVED
    outcome = decide(seen(job=STOPPED, incidents=[requested()]), [], SETTINGS, NOW)
    assert [d.kind for d in outcome.decisions] == [DecisionKind.STOP_JOB]
    assert outcome.incidents[-1].state is IncidentState.RESOLVED


def test_the_guards_hold_it_like_any_other_action() -> None:
    for settings, rule in (
        (PolicySettings(dry_run=True), "only_say_it_in_a_dry_run"),
        (PolicySettings(approve=(SAVE,)), "wait_for_approval"),
    ):
        assert decided(decide(seen(ORDER), [], settings, NOW)).rule == rule
    moves = PolicySettings(approve=(DecisionKind.MIGRATE_TO_SPARE,))
    assert decided(decide(seen(ORDER), [], moves, NOW)).kind is SAVE
