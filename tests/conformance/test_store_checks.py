"""Checks of hosts: running from their decision on, with their action in the view until the result is stored."""

from __future__ import annotations

import pytest

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, CommandResult, Decision, DecisionKind, UpdateState
from flyball.contracts.reports.host_checks import CheckMeasure, CheckState, HostCheck
from services.actuator.rules.playbook import advance
from services.controller.policy import decide
from services.controller.round import check_plans
from services.controller.round.view import CheckChange, HostView, PolicySettings

T = 1000.0


@pytest.fixture
def stores(port_stores):
    return port_stores


def begun(stores, *names: str, number: int = 1) -> Decision:
    hosts = [HostView(name, HostState.HEALTHY, T, "10.0.0.1", "", "", 4000, T) for name in names]
    plan = check_plans.check_plan(hosts[:1], hosts[1:], timeout_s=60.0)
    return Decision(f"dec-{number}", "", "", plan.kind, "Because.", "check_on_request", T, action=plan)


def checks(stores) -> dict[str, HostCheck]:
    seen = stores.decisions.load_view()
    assert seen.hosts == stores.other_decisions().load_view().hosts, "every controller reads the same"
    return {host.host_id: host.check for host in seen.hosts if host.check is not None}


def test_a_check_runs_from_its_decision_until_its_result_is_stored(stores, make) -> None:
    stores.status.record_reports([(make.report(name), T) for name in ("host-a", "host-b")])
    stores.lead()
    stores.commit(decisions=(begun(stores, "host-a", "host-b"),))
    assert checks(stores) == {"host-a": HostCheck(CheckState.RUNNING, T, "act-1")}, "helpers are not judged"

    (progress,) = stores.actions.open_actions()
    assert progress.plan.job == "" and stores.actions.apply(progress, advance(progress, T), T)
    (command,) = stores.actions.commands_for("host-a", T)
    for name in ("host-a", "host-b"):
        measure = CheckMeasure(name, 1, ("host-a", "host-b"), 1, 0.1, 0.2)
        answered = make.update(f"{command.action_id}.check.{name}.1", result=CommandResult(check=measure))
        stores.actions.record(answered)
    (progress,) = stores.actions.open_actions()
    assert [record.state for record in progress.commands] == [UpdateState.SUCCEEDED] * 2
    assert stores.actions.apply(progress, advance(progress, T + 5), T + 5)

    view = stores.decisions.load_view()
    (action,) = view.actions
    assert action.state is ActionState.SUCCEEDED and len(action.checks) == 2, "ended, but not taken in"
    outcome = decide(view, [], PolicySettings(), T + 6)
    assert {change.host_id: change.check.state for change in outcome.checks} == {
        "host-a": CheckState.PASSED,
        "host-b": CheckState.PASSED,
    }
    stores.commit(checks=outcome.checks)
    assert {name: check.state for name, check in checks(stores).items()} == dict.fromkeys(
        ("host-a", "host-b"), CheckState.PASSED
    )
    assert stores.decisions.load_view().actions == ()


def test_a_result_does_not_replace_a_newer_check(stores, make) -> None:
    stores.status.record_reports([(make.report("host-a"), T)])
    stores.lead()
    stores.commit(decisions=(begun(stores, "host-a", number=1),))
    stores.commit(decisions=(begun(stores, "host-a", number=2),))
    stores.commit(checks=(CheckChange("host-a", HostCheck(CheckState.FAILED, T + 1, "act-1")),))
    assert checks(stores)["host-a"] == HostCheck(CheckState.RUNNING, T, "act-2")
    assert DecisionKind.CHECK_HOSTS in {action.plan.kind for action in stores.decisions.load_view().actions}
