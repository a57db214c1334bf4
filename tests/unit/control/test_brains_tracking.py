"""How an incident follows its ranks: failed steps, overdue starts, resolution."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    BUDGET,
    GENERATION,
    JOB,
    NOTICED,
    NOW,
    SAVED,
    SETTINGS,
    UNSTARTED,
    action,
    decided,
    exited,
    host,
    incident,
    preempted,
    rank,
    view,
)

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from services.controller.round.view import JobView


def test_an_incident_is_resolved_when_every_rank_is_past_the_failed_step() -> None:
    (verifying,) = decide(view(incidents=[incident()], actions=[action()]), [], SETTINGS, NOW).incidents
    assert (verifying.state, verifying.restored_step) == (IncidentState.VERIFYING, 49)
    assert (verifying.failed_step, verifying.lost_steps) == (50, 1)
    seen = view(incidents=[verifying], actions=[action()])
    assert decide(seen, [], SETTINGS, NOW).empty or not decide(seen, [], SETTINGS, NOW).incidents
    ranks = (rank(0, "a", step=51), rank(1, "b", step=51))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    (resolved,) = decide(view(job=job, incidents=[verifying], actions=[action()]), [], SETTINGS, NOW).incidents
    assert resolved.state is IncidentState.RESOLVED and resolved.resolved_at == NOW


def test_ranks_of_a_lost_host_count_like_the_slowest_of_the_others() -> None:
    partial = action(positions={"0": 55}, restore_step=53)
    (verifying,) = decide(view(incidents=[incident()], actions=[partial]), [], SETTINGS, NOW).incidents
    assert (verifying.failed_step, verifying.lost_steps) == (55, 2)


def test_a_start_that_never_gets_going_is_tried_again() -> None:
    ranks = (rank(0, "a", step=-1, phase=Phase.RESTORING), rank(1, "b", step=-1, phase=Phase.STARTING))
    generation = msgspec.structs.replace(GENERATION, started_at=NOW - 300, ranks=ranks)
    job = msgspec.structs.replace(JOB, generation=generation)
    waiting = incident(state=IncidentState.VERIFYING, since=NOW - 299, restored_step=49)
    early = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW)
    assert not early.decisions and early.wake_at == NOW + 1
    unheard = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW + 1)
    assert not unheard.decisions and unheard.wake_at == NOW + 2  # after an outage: its steps may be on their way
    heard = tuple(host(name, job="job", last_report_at=NOW + 1.1) for name in "ab")
    late = decide(view(job=job, hosts=heard, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW + 1.5)
    assert decided(late).kind is DecisionKind.RESTART_IN_PLACE


def test_a_started_rank_that_its_host_never_reports_is_missed_soon() -> None:
    """Its host may have lost it before the first report."""
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=(rank(0, "a"),)))
    waiting = incident(state=IncidentState.VERIFYING, since=NOW - 12)
    outcome = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.RESTART_IN_PLACE
    young = msgspec.structs.replace(waiting, since=NOW - 8)
    assert not decide(view(job=job, incidents=[young], actions=[action()]), [], SETTINGS, NOW).decisions


def test_an_adopted_job_whose_workers_are_dead_is_restarted_soon() -> None:
    """Nobody saw their exits, and no incident is open: all that is known is that their hosts report without them."""
    for started_at, is_missed in ((NOW - 10.5, True), (NOW - 9.5, False)):
        generation = msgspec.structs.replace(GENERATION, ranks=(), started_at=started_at)
        adopted = msgspec.structs.replace(JOB, generation=generation)
        outcome = decide(view(job=adopted), [], SETTINGS, NOW)
        assert bool(outcome.decisions) is is_missed
        if is_missed:
            assert (outcome.incidents[0].cause, decided(outcome).kind) == (
                "start_overdue",
                DecisionKind.RESTART_IN_PLACE,
            )


def test_ranks_that_no_report_could_contain_yet_are_not_missing() -> None:
    generation = msgspec.structs.replace(GENERATION, ranks=(), started_at=NOW - 600)
    job = msgspec.structs.replace(JOB, generation=generation)
    away = tuple(host(name, job="job", last_report_at=NOW - 595) for name in "ab")
    back = decide(view(job=job, hosts=away), [], SETTINGS, NOW)
    assert not back.incidents and back.wake_at == NOW + 1
    behind = tuple(host(name, job="job", stored_report_at=NOW - 595) for name in "ab")  # heard of, and not yet stored
    assert not decide(view(job=job, hosts=behind), [], SETTINGS, NOW).incidents
    assert decide(view(job=job), [], SETTINGS, NOW).incidents[0].cause == "start_overdue"


def test_a_host_without_a_row_is_unknown_not_absent() -> None:
    """Ten thousand hosts that join at once are heard and stored over seconds. A sensor finds out who is silent."""
    generation = msgspec.structs.replace(GENERATION, ranks=(), started_at=NOW - 600)
    joining = view(job=msgspec.structs.replace(JOB, generation=generation))
    for known in (0, 1):
        outcome = decide(msgspec.structs.replace(joining, hosts=joining.hosts[:known]), [], SETTINGS, NOW)
        assert not outcome.incidents and outcome.wake_at == NOW + 1


def test_a_script_that_never_attaches_is_resolved_by_living() -> None:
    ranks = (rank(0, "a", step=-1, phase=Phase.STARTING), rank(1, "b", step=-1, phase=Phase.STARTING))
    generation = msgspec.structs.replace(GENERATION, ranks=ranks, restore_step=None)
    job = msgspec.structs.replace(JOB, generation=generation)
    waiting = incident(state=IncidentState.VERIFYING, since=NOW - 5, failed_step=-1)
    early = decide(view(job=job, incidents=[waiting]), [], SETTINGS, NOW)
    assert not early.incidents and early.wake_at == NOW + 5
    (resolved,) = decide(view(job=job, incidents=[waiting]), [], SETTINGS, NOW + 5).incidents
    assert resolved.state is IncidentState.RESOLVED
    for at, lives in ((NOW - 5, True), (NOW - 5.001, False)):
        seen = tuple(msgspec.structs.replace(one, reported_at=at) for one in ranks)
        reported = msgspec.structs.replace(job, generation=msgspec.structs.replace(generation, ranks=seen))
        later = decide(view(job=reported, incidents=[waiting]), [], SETTINGS, NOW + 5)
        assert (later.incidents != ()) is lives, "it lived after the incident began to wait"


def test_a_granted_generation_that_nobody_starts_becomes_an_incident() -> None:
    generation = msgspec.structs.replace(GENERATION, started_at=0.0, ranks=())
    job = msgspec.structs.replace(JOB, generation=generation)
    outcome = decide(view(job=job), [], SETTINGS, NOW)
    assert outcome.incidents[0].cause == "start_overdue"
    assert decided(outcome).kind is DecisionKind.RESTART_IN_PLACE


def parked(*phases: Phase) -> JobView:
    ranks = tuple(rank(number, "ab"[number], phase=phase) for number, phase in enumerate(phases))
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def test_ranks_that_are_parked_for_nothing_are_restarted() -> None:
    """The database was set back, and knows nothing of the action for which they saved."""
    outcome = decide(view(job=parked(Phase.STEP, Phase.PARKED), copies=SAVED), [], SETTINGS, NOW)
    (found,) = outcome.incidents
    assert (found.cause, found.generation, found.observed_at) == ("ranks_parked", 2, NOW)
    assert (decided(outcome).kind, decided(outcome).evidence) == (
        DecisionKind.RESTART_IN_PLACE,
        {"ranks": "1"} | BUDGET,
    )
    assert decide(view(job=parked(Phase.STEP, Phase.STEP)), [], SETTINGS, NOW).empty
    running = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    assert not decide(view(job=parked(Phase.PARKED, Phase.PARKED), actions=[running]), [], SETTINGS, NOW).incidents
    noticed = view(job=parked(Phase.PARKED, Phase.PARKED), hosts=preempted(), incidents=[NOTICED])
    assert {i.cause for i in decide(noticed, [], SETTINGS, NOW).incidents} == {"preemption_notice"}


VERIFYING = incident(state=IncidentState.VERIFYING, restored_step=50, failed_step=900)


def test_ranks_that_were_stopped_for_nothing_are_restarted() -> None:
    """The database was set back to before the command, and knows nothing of the action."""
    ended = msgspec.structs.replace(exited(0, exit_code=None, signal=15, error=""), expected=True)
    stopped = (msgspec.structs.replace(rank(0, "a"), exited=ended, exited_at=NOW - 11), rank(1, "b"))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=stopped))
    outcome = decide(view(job=job, copies=SAVED), [], SETTINGS, NOW)
    assert [(i.cause, i.generation, i.observed_at) for i in outcome.incidents] == [("ranks_stopped", 2, NOW)]
    assert (decided(outcome).kind, decided(outcome).evidence["ranks"]) == (DecisionKind.RESTART_IN_PLACE, "0")
    running = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    assert not decide(view(job=job, actions=[running]), [], SETTINGS, NOW).incidents, "that one stopped them"
    (again,) = decide(view(job=job, copies=SAVED, incidents=[VERIFYING]), [], SETTINGS, NOW).incidents
    assert (again.incident_id, again.cause) == ("inc-1", "ranks_stopped"), "it need not wait until that is overdue"


@pytest.mark.parametrize(("exited_ago_s", "reported_ago_s"), [(9.0, 0.1), (30.0, 20.5)])
def test_a_daemon_that_ends_has_stopped_its_ranks_too(exited_ago_s: float, reported_ago_s: float) -> None:
    """A host that reports no more is found to be silent. So stopped ranks count once it has reported for a while."""
    ended = msgspec.structs.replace(exited(0, exit_code=None, signal=15, error=""), expected=True)
    stopped = (msgspec.structs.replace(rank(0, "a"), exited=ended, exited_at=NOW - exited_ago_s), rank(1, "b"))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=stopped))
    hosts = (host("a", job="job", last_report_at=NOW - reported_ago_s), *view().hosts[1:])
    outcome = decide(view(job=job, hosts=hosts, copies=SAVED), [], SETTINGS, NOW)
    assert not outcome.incidents and outcome.wake_at > NOW


def test_ranks_are_not_missed_while_an_action_of_their_job_runs() -> None:
    running = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    assert not decide(view(job=UNSTARTED, actions=[running]), [], SETTINGS, NOW).incidents
    assert decide(view(job=UNSTARTED), [], SETTINGS, NOW).incidents[0].cause == "start_overdue"
    other = msgspec.structs.replace(running, plan=msgspec.structs.replace(running.plan, job="other"))
    assert decide(view(job=UNSTARTED, actions=[other]), [], SETTINGS, NOW).incidents


@pytest.mark.parametrize(
    ("state", "ends", "lost"),
    [
        (ActionState.SUPERSEDED, IncidentState.ACTING, 60),
        (ActionState.FAILED, IncidentState.ACTING, 60),
        (ActionState.SUCCEEDED, IncidentState.VERIFYING, 60),
    ],
)
def test_the_answers_of_an_action_move_the_failed_step(state: ActionState, ends: IncidentState, lost: int) -> None:
    answered = action(state=state, positions={"0": 60, "1": 61}, restore_step=49, message="no disk")
    (found,) = decide(view(job=UNSTARTED, incidents=[incident()], actions=[answered]), [], SETTINGS, NOW).incidents
    assert (found.state, found.failed_step) == (ends, lost)
    if state is ActionState.SUCCEEDED:
        assert (found.restored_step, found.lost_steps) == (49, 11)
