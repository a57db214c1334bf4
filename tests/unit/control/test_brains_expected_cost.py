"""What a decision weighed: each course with its expected loss in rank seconds, in sentences with their numbers."""

from __future__ import annotations

import msgspec
import pytest
from support.policy import golden
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    KILLED,
    LOST,
    NOW,
    SAVED,
    SETTINGS,
    decided,
    host,
    incident,
    preempted,
    say,
    submitted,
    view,
    with_exit,
)

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import Alternative, Decision, DecisionKind, IncidentState
from services.controller.replay import compared
from services.controller.round.view import HostView, PastRecovery

RESTART, MIGRATE, HOLD = DecisionKind.RESTART_IN_PLACE, DecisionKind.MIGRATE_TO_SPARE, DecisionKind.HOLD


def courses(decision: Decision) -> dict[DecisionKind, Alternative]:
    assert sum(course.is_chosen for course in decision.alternatives) == 1
    for course in decision.alternatives:
        golden.note(f"the course {course.kind.value}", course.reason)
    return {course.kind: course for course in decision.alternatives}


def test_a_restart_costs_its_duration_and_the_steps_to_redo_on_every_rank() -> None:
    # The generation made 10 steps (40 to 50) in 99.9 s; the recovery point is 48.
    copies = [msgspec.structs.replace(copy, step=48) for copy in SAVED]
    recoveries = tuple(PastRecovery(RESTART, took_s) for took_s in (3.0, 9.0, 4.0))
    job = msgspec.structs.replace(JOB, recoveries=recoveries)
    found = courses(decided(decide(view(job=job, copies=copies), [say(KILLED)], SETTINGS, NOW)))
    step_s = 99.9 / 10
    assert found[RESTART].is_chosen
    assert found[RESTART].expected_cost_gpu_s == pytest.approx(2 * (4.0 + 2 * step_s), abs=0.1)
    move_s = SETTINGS.assumed_migration_s
    assert found[MIGRATE].expected_cost_gpu_s == pytest.approx(2 * (move_s + 2 * step_s), abs=0.1)


def silent_b(*more: HostView) -> tuple[HostView, ...]:
    return (HOSTS[0], host("b", job="job", state=HostState.SILENT, since=NOW - 20, last_report_at=NOW - 30), *more)


def test_without_a_spare_every_course_but_waiting_and_failing_is_out_of_reach() -> None:
    found = courses(decided(decide(view(hosts=silent_b(), copies=SAVED), [], SETTINGS, NOW)))
    assert found[HOLD].is_chosen
    assert [kind for kind, course in found.items() if not course.is_feasible] == [RESTART, MIGRATE, DecisionKind.SHRINK]
    wait_s = SETTINGS.assumed_spare_wait_s
    assert found[HOLD].expected_cost_gpu_s == 2 * (wait_s + SETTINGS.assumed_migration_s)
    # A restart now, another one to grow again, and one missing rank in between.
    assert found[DecisionKind.SHRINK].expected_cost_gpu_s == 2 * (10.0 + 20.0) + wait_s


def test_a_lost_host_is_replaced_and_cannot_be_restarted_in_place() -> None:
    found = courses(decided(decide(view(hosts=silent_b(HOSTS[2]), copies=SAVED), [], SETTINGS, NOW)))
    assert found[MIGRATE].is_chosen and not found[RESTART].is_feasible


def test_a_hold_with_an_end_costs_the_wait_and_what_follows() -> None:
    found = courses(decided(decide(view(job=with_exit(LOST), copies=SAVED), [], SETTINGS, NOW)))
    assert found[HOLD].is_chosen
    expected = 2 * (SETTINGS.root_cause_window_s + SETTINGS.assumed_restart_s)
    assert found[HOLD].expected_cost_gpu_s == pytest.approx(expected)


def test_a_notice_weighs_a_save_against_training_on_until_the_host_is_gone() -> None:
    copies = [msgspec.structs.replace(copy, step=48) for copy in SAVED]
    found = courses(decided(decide(view(hosts=preempted(), copies=copies), [], SETTINGS, NOW)))
    save = found[DecisionKind.EMERGENCY_CHECKPOINT]
    assert save.is_chosen and save.expected_cost_gpu_s < found[HOLD].expected_cost_gpu_s


def test_failing_saves_cost_nothing_yet() -> None:
    failing = incident(
        cause="saves_failing", generation=2, state=IncidentState.DECIDING, action_id="", decisions_made=0, hosts=("b",)
    )
    found = courses(decided(decide(view(incidents=[failing], copies=SAVED), [], SETTINGS, NOW)))
    assert found[HOLD].is_chosen and found[HOLD].expected_cost_gpu_s == 0.0
    assert DecisionKind.FAIL_JOB not in found


def test_a_decision_without_an_incident_weighs_nothing() -> None:
    free = (host("a"), host("b"), host("c"))
    assert decided(decide(view(job=submitted(), hosts=free), [], SETTINGS, NOW)).alternatives == ()


def test_the_steps_of_a_job_that_never_stepped_cost_nothing() -> None:
    ranks = tuple(msgspec.structs.replace(rank, step=-1) for rank in GENERATION.ranks)
    fresh = msgspec.structs.replace(GENERATION, ranks=ranks, restore_step=None, lineage=(), furthest_step=-1)
    job = msgspec.structs.replace(JOB, generation=fresh, newest_step=-1)
    killed = msgspec.structs.replace(KILLED, last_step=-1)
    found = courses(decided(decide(view(job=job), [say(killed)], SETTINGS, NOW)))
    assert "no step is redone" in found[RESTART].reason


def test_a_decision_of_an_older_release_weighed_nothing_and_is_reproduced_all_the_same() -> None:
    new = decided(decide(view(copies=SAVED), [say(KILLED)], SETTINGS, NOW))
    stored = {k: v for k, v in msgspec.to_builtins(new).items() if k != "alternatives"}
    old = msgspec.convert(stored, Decision)
    assert old.alternatives == ()
    assert compared([old], [new]) == (1, [])
    assert compared([new], [old])[0] == 0
