"""Each rule and guard decides a named situation, which is decided otherwise without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    KILLED,
    LOST,
    NOTICED,
    NOW,
    SAVED,
    SEEN_BEFORE,
    SETTINGS,
    SPEC,
    STOPPED,
    action,
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
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.orders import Order, OrderKind
from flyball.contracts.reports.signals import Signal
from services.controller import policy
from services.controller.round.view import Outcome, PastFailure, PolicySettings, View


class Situation(NamedTuple):
    seen: View
    signals: Sequence[Signal] = ()
    settings: PolicySettings = SETTINGS


LOST_B = (HOSTS[0], host("b", job="job", state=HostState.SILENT, since=NOW - 20, last_report_at=NOW - 30))
SAVED_VIEW = view(copies=SAVED)
OUT_OF_MEMORY = msgspec.structs.replace(KILLED, error_class="host_out_of_memory")
DECIDING = {"state": IncidentState.DECIDING, "generation": 2}


def changed(seen: View, **more: Any) -> View:  # noqa: ANN401 - fields of View
    return msgspec.structs.replace(seen, **more)


def of_job(**more: Any) -> View:  # noqa: ANN401 - fields of JobView
    return view(job=msgspec.structs.replace(JOB, **more), copies=SAVED)


SITUATIONS: dict[str, Situation] = {
    # jobs
    "stop_on_request": Situation(view(job=STOPPED)),
    "complete_when_all_ranks_are_done": Situation(
        view(), [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in (0, 1)]
    ),
    "start_when_hosts_suffice": Situation(view(job=submitted(), hosts=(host("a"), host("b"), host("c")))),
    # failures
    "fail_after_too_many_decisions": Situation(
        view(incidents=[incident(**DECIDING, decisions_made=8)], copies=SAVED), [say(KILLED)]
    ),
    "leave_the_host_of_an_identical_exception": Situation(
        of_job(failures=(PastFailure(1, "worker_exception", "ValueError", "boom", 50, "b"),)), [say(exited())]
    ),
    "fail_on_identical_exception": Situation(view(job=SEEN_BEFORE, copies=SAVED), [say(exited())]),
    "back_off_after_a_failed_action": Situation(
        view(
            incidents=[incident(**DECIDING, decisions_made=3, since=NOW - 0.1)],
            actions=[action(state=ActionState.FAILED)],
            copies=SAVED,
        ),
        [say(KILLED)],
    ),
    "wait_for_the_root_cause": Situation(view(job=with_exit(LOST), copies=SAVED)),
    "fail_when_restarts_are_used_up": Situation(
        of_job(generation=msgspec.structs.replace(GENERATION, restart_count=3, restarts_used=3)), [say(KILLED)]
    ),
    "migrate_to_spare": Situation(view(hosts=(*LOST_B, HOSTS[2]), copies=SAVED)),
    "wait_for_a_spare": Situation(view(hosts=LOST_B, copies=SAVED)),
    "go_on_with_fewer_hosts": Situation(
        view(
            job=msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, min_nodes=1)),
            hosts=LOST_B,
            incidents=[incident(**DECIDING, cause="host_silent", since=NOW - 30)],
            copies=SAVED,
        )
    ),
    "restart_on_more_hosts": Situation(
        of_job(spec=msgspec.structs.replace(SPEC, min_nodes=1, max_nodes=3)), [say(KILLED)]
    ),
    "retry_on_a_larger_host": Situation(
        view(hosts=(HOSTS[0], host("b", job="job", memory_bytes=8), host("c", memory_bytes=9)), copies=SAVED),
        [say(OUT_OF_MEMORY)],
    ),
    "retry_with_as_much_memory": Situation(SAVED_VIEW, [say(OUT_OF_MEMORY)]),
    "restart_in_place": Situation(SAVED_VIEW, [say(KILLED)]),
    # departures
    "save_before_the_host_goes": Situation(view(hosts=preempted(), copies=SAVED)),
    "let_the_other_incident_go_first": Situation(
        view(
            hosts=preempted(),
            incidents=[incident(incident_id="inc-0"), NOTICED],
            actions=[action(state=ActionState.DISPATCHED)],
            copies=SAVED,
        )
    ),
    # guards
    "never_from_scratch": Situation(
        view(job=msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, never_from_scratch=True))),
        [say(KILLED)],
    ),
    "wait_for_the_end_of_maintenance": Situation(
        changed(
            view(hosts=(*LOST_B, HOSTS[2]), copies=SAVED),
            orders=(Order(OrderKind.SILENCE, "b", NOW - 60, "firmware", NOW + 600),),
        ),
        [say(msgspec.structs.replace(KILLED, rank=0))],
    ),
    "act_no_more_often": Situation(
        of_job(acted_at=(NOW - 1, NOW - 2)), [say(KILLED)], PolicySettings(max_actions_per_hour=2)
    ),
    "only_say_it_in_a_dry_run": Situation(SAVED_VIEW, [say(KILLED)], PolicySettings(dry_run=True)),
    "wait_for_approval": Situation(
        SAVED_VIEW, [say(KILLED)], PolicySettings(approve=(DecisionKind.RESTART_IN_PLACE,))
    ),
}  # fmt: skip


def decide(situation: Situation) -> Outcome:
    return policy.decide(situation.seen, situation.signals, situation.settings, NOW)


@pytest.mark.parametrize("rule", SITUATIONS)
def test_without_this_rule_its_situation_is_decided_otherwise(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    situation = SITUATIONS[rule]
    with_it = decide(situation)
    assert rule in [decision.rule for decision in with_it.decisions]

    def left(rules: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(other for other in rules if other.__name__ != rule)

    rules_for = policy.rules_for
    monkeypatch.setattr(policy, "rules_for", lambda cause: left(rules_for(cause)))
    monkeypatch.setattr(policy, "JOB_RULES", left(policy.JOB_RULES))
    monkeypatch.setattr(policy, "GUARDS", left(policy.GUARDS))
    without = decide(situation)
    assert [(d.rule, d.kind) for d in without.decisions] != [(d.rule, d.kind) for d in with_it.decisions]
