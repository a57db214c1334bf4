"""Hosts that help to check others."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import JOB, NOW, SETTINGS, action, host, view

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import CommandResult, CommandUpdate, UpdateState
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage, CheckState, HostCheck
from services.controller.round import check_plans
from services.record.answers import sum_up

RUNNING = HostCheck(CheckState.RUNNING, NOW - 5.0, "act-9")


@pytest.mark.parametrize(("job", "is_cordoned"), [("", True), ("job", False)])
def test_a_helper_that_got_ranks_meanwhile_is_not_judged(job: str, is_cordoned: bool) -> None:
    """Its device may have failed for want of the memory that they take."""
    judged, helper = host("c", state=HostState.CORDONED, since=NOW - 7200, check=RUNNING), host("b", job=job)
    measures = (
        CheckMeasure("c", 1, ("c", "b"), 1, 0.1, 0.0, CheckStage.GROUP, "b did not join the group in time"),
        CheckMeasure("b", 1, ("c", "b"), 1, 0.0, 0.0, CheckStage.DEVICE, "CUDA out of memory"),
    )
    plan = check_plans.check_plan([judged], [helper], timeout_s=60.0)
    done = action(action_id="act-9", incident_id="", plan=plan, phase="check", checks=measures)
    outcome = decide(view(job=JOB, hosts=(host("a", job="job"), helper, judged), actions=[done]), [], SETTINGS, NOW)
    cordoned = [change.host_id for change in outcome.hosts if change.state is HostState.CORDONED]
    assert cordoned == (["b"] if is_cordoned else [])
    assert {change.host_id: change.check.state for change in outcome.checks}["c"] is CheckState.UNKNOWN


# --- daemons that answer a check without a measurement ---------------------------------------------------------------


def _answer(host_id: str, state: UpdateState, code: str, message: str) -> CommandUpdate:
    return CommandUpdate(f"act-9.check.{host_id}.1", host_id, "i", state, NOW, code=code, message=message)


@pytest.mark.parametrize(
    ("answered", "states", "why"),
    [
        (_answer("a", UpdateState.REFUSED, "stale_command", "a newer fence was obeyed"), "UUPP", "a newer fence"),
        (_answer("a", UpdateState.FAILED, "storage_full", "The disk is full."), "UUPP", "The disk is full"),
        (_answer("a", UpdateState.FAILED, "interrupted", ""), "UUPP", "interrupted"),
        (None, "FUPP", "did not answer"),
    ],
)
def test_a_daemon_that_refuses_a_check_blames_nobody(answered: CommandUpdate | None, states: str, why: str) -> None:
    """Only a measurement, or a daemon that says nothing at all, speaks against a host."""
    measured = (
        CheckMeasure("b", 1, ("a", "b"), 1, 0.1, 0.0, CheckStage.GROUP, "a did not join the group in time"),
        CheckMeasure("c", 1, ("c", "d"), 1, 0.1, 0.1),
        CheckMeasure("d", 1, ("c", "d"), 1, 0.1, 0.1),
    )
    updates = [_answer(m.host_id, UpdateState.SUCCEEDED, "", "") for m in measured]
    updates = [
        msgspec.structs.replace(u, result=CommandResult(check=m)) for u, m in zip(updates, measured, strict=True)
    ]
    answers = sum_up([*([answered] if answered else []), *updates])
    hosts = [host(name, check=RUNNING) for name in "abcd"]
    plan = check_plans.check_plan(hosts, [], timeout_s=60.0)
    done = action(action_id="act-9", plan=plan, checks=answers.checks, unmeasured=answers.unmeasured)
    found = check_plans.results(done, NOW)
    assert "".join(found[name].state.value[0].upper() for name in "abcd") == states
    assert why in found["a"].message


def test_hosts_that_all_refuse_a_check_are_unknown_and_none_is_cordoned() -> None:
    answers = sum_up(_answer(name, UpdateState.REFUSED, "stale_command", "a newer fence was obeyed") for name in "ab")
    hosts = [host(name, check=RUNNING) for name in "ab"]
    plan = check_plans.check_plan(hosts, [], timeout_s=60.0)
    facts = {"action_id": "act-9", "incident_id": "", "plan": plan, "phase": "check"}
    done = action(**facts, unmeasured=answers.unmeasured)
    outcome = decide(view(job=JOB, hosts=(host("c", job="job"), *hosts), actions=[done]), [], SETTINGS, NOW)
    assert {change.check.state for change in outcome.checks} == {CheckState.UNKNOWN}
    assert not [change for change in outcome.hosts if change.state is HostState.CORDONED]
