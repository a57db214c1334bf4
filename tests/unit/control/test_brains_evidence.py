"""The facts that a decision stores as its evidence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    BUDGET,
    HOSTS,
    KILLED,
    LOST,
    NOTICED,
    NOW,
    SAVED,
    SEEN_BEFORE,
    SETTINGS,
    STOPPED,
    UNSTARTED,
    action,
    decided,
    exited,
    host,
    incident,
    preempted,
    say,
    submitted,
    view,
    with_exit,
)

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, IncidentState
from flyball.contracts.reports.signals import HostSilent, Signal
from services.controller.round.view import View

SILENT_B = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
KILL = {
    "rank": 1,
    "host": "b",
    "pid": 4242,
    "step": 50,
    "exit_code": None,
    "signal": 9,
    "error": None,
    "error_class": "killed",
}
RAISED = KILL | {"exit_code": 1, "signal": None, "error": "ValueError: boom", "error_class": "user_exception"}
ENDS = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
FAILED_TWICE = action(state=ActionState.FAILED, message="no disk", phase="stop")
GIVEN_UP = msgspec.structs.replace(NOTICED, decisions_made=8)
STALE = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW, stale_jobs={"job": 1})


@pytest.mark.parametrize(
    ("seen", "signals", "rule", "evidence"),
    [
        (view(job=STOPPED), (), "stop_on_request", {"newest_step": 50}),
        (
            view(job=submitted(), hosts=(host("a"), host("b"))),
            (),
            "start_when_hosts_suffice",
            {"nnodes": 2, "nproc_per_node": 1, "hosts": "a,b"},
        ),
        (view(), ENDS, "complete_when_all_ranks_are_done", {"generation": 2, "newest_step": 50}),
        (view(copies=SAVED), [say(KILLED)], "restart_in_place", KILL | BUDGET),
        (
            view(copies=SAVED),
            [SILENT_B],
            "migrate_to_spare",
            {"hosts": "b", "ranks": "1", "from": "b", "to": "c"} | BUDGET,
        ),
        (view(hosts=HOSTS[:2]), [SILENT_B], "wait_for_a_spare", {"lost": "b", "free": ""}),
        (
            view(
                job=with_exit(KILLED),
                incidents=[incident(state=IncidentState.DECIDING, generation=2, decisions_made=8)],
            ),
            (),
            "fail_after_too_many_decisions",
            KILL | BUDGET | {"decisions": 8},
        ),
        (
            view(job=SEEN_BEFORE),
            [say(exited())],
            "fail_on_identical_exception",
            RAISED | BUDGET | {"times": 2, "error": "ValueError"},
        ),
        (
            view(job=UNSTARTED, incidents=[incident(decisions_made=3)], actions=[FAILED_TWICE]),
            (),
            "back_off_after_a_failed_action",
            {"action": "act-1", "decisions": 3},
        ),
        (view(), [say(LOST)], "wait_for_the_root_cause", {"unheard": "a,b", "window_s": 2.0}),
        (
            view(hosts=(HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 20.0625), HOSTS[2])),
            (),
            "save_before_the_host_goes",
            {"host": "b", "remaining_s": 20.062, "step": 54, "newest_step": 50},
        ),
        (
            view(hosts=(HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 20.0625))),
            (),
            "wait_for_a_spare",
            {"host": "b", "remaining_s": 20.062},
        ),
        (view(hosts=preempted(), incidents=[GIVEN_UP]), (), "give_up_after_too_many_decisions", {"decisions": 8}),
        (view(hosts=(*HOSTS[:2], STALE)), (), "stop_superseded_workers", {"host": "c", "generation": 1}),
    ],
)
def test_the_evidence_of_a_decision(
    seen: View, signals: Sequence[Signal], rule: str, evidence: dict[str, object]
) -> None:
    decision = decided(decide(seen, signals, SETTINGS, NOW))
    assert (decision.rule, decision.evidence) == (rule, evidence)


def test_what_comes_first_is_named_in_the_evidence() -> None:
    held = incident(
        cause="rank_stalled", incident_id="inc-3", state=IncidentState.ACTING, generation=2, action_id="act-1"
    )
    running = action(state=ActionState.DISPATCHED, incident_id="inc-3")
    outcome = decide(view(hosts=preempted(), incidents=[held, NOTICED], actions=[running]), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.evidence) == ("let_the_other_incident_go_first", {"incident": "inc-3"})
    assert outcome.wake_at == 0.0, "what ends the hold is a change, which starts a round by itself"
