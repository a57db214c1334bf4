"""The facts that a decision stores as its evidence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy import golden
from support.policy.checked import decide
from support.policy.views import (
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
ENDS = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
FAILED_TWICE = action(state=ActionState.FAILED, message="no disk", phase="stop")
GIVEN_UP = msgspec.structs.replace(NOTICED, decisions_made=8)
OFTEN = incident(state=IncidentState.DECIDING, generation=2, decisions_made=8)
GOES = host("b", job="job", preempt_deadline_at=NOW + 20.0625)
STALE = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW, stale_jobs={"job": 1})


@pytest.mark.parametrize(
    ("seen", "signals", "rule"),
    [
        (view(job=STOPPED), (), "stop_on_request"),
        (view(job=submitted(), hosts=(host("a"), host("b"))), (), "start_when_hosts_suffice"),
        (view(), ENDS, "complete_when_all_ranks_are_done"),
        (view(copies=SAVED), [say(KILLED)], "restart_in_place"),
        (view(copies=SAVED), [SILENT_B], "migrate_to_spare"),
        (view(hosts=HOSTS[:2]), [SILENT_B], "wait_for_a_spare"),
        (view(job=with_exit(KILLED), incidents=[OFTEN]), (), "fail_after_too_many_decisions"),
        (view(job=SEEN_BEFORE), [say(exited())], "fail_on_identical_exception"),
        (
            view(job=UNSTARTED, incidents=[incident(decisions_made=3)], actions=[FAILED_TWICE]),
            (),
            "back_off_after_a_failed_action",
        ),
        (view(), [say(LOST)], "wait_for_the_root_cause"),
        (view(hosts=(HOSTS[0], GOES, HOSTS[2])), (), "save_before_the_host_goes"),
        (view(hosts=(HOSTS[0], GOES)), (), "wait_for_a_spare"),
        (view(hosts=preempted(), incidents=[GIVEN_UP]), (), "give_up_after_too_many_decisions"),
        (view(hosts=(*HOSTS[:2], STALE)), (), "stop_superseded_workers"),
    ],
)
def test_the_evidence_of_a_decision(seen: View, signals: Sequence[Signal], rule: str) -> None:
    decision = decided(decide(seen, signals, SETTINGS, NOW))
    assert decision.rule == rule
    golden.note_evidence(rule, decision.evidence)


def test_what_comes_first_is_named_in_the_evidence() -> None:
    held = incident(
        cause="rank_stalled", incident_id="inc-3", state=IncidentState.ACTING, generation=2, action_id="act-1"
    )
    running = action(state=ActionState.DISPATCHED, incident_id="inc-3")
    outcome = decide(view(hosts=preempted(), incidents=[held, NOTICED], actions=[running]), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.evidence) == ("let_the_other_incident_go_first", {"incident": "inc-3"})
    assert outcome.wake_at == 0.0, "what ends the hold is a change, which starts a round by itself"
