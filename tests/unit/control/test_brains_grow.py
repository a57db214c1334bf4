"""A job that runs on fewer hosts than it asked for, and hosts that are free again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import GENERATION, JOB, KILLED, NOW, SETTINGS, action, decided, host, rank, say, view

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier, world_size_of
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, GenerationPlan, Incident, IncidentState
from flyball.contracts.reports.drains import DrainState
from services.controller.round.view import (
    ActionView,
    DrainView,
    HostView,
    JobView,
    Outcome,
    PastFailure,
    PastRecovery,
    PolicySettings,
    View,
)

GROW, HOLD, RESUME, SAVE = (
    DecisionKind.GROW,
    DecisionKind.HOLD,
    DecisionKind.RESUME,
    DecisionKind.EMERGENCY_CHECKPOINT,
)
SPEC = JobSpec(
    job="job",
    argv=("t.py",),
    workdir="/",
    nnodes=2,
    nproc_per_node=1,
    min_nodes=1,
    max_nodes=3,
    checkpoint=CheckpointSpec(every_steps=1),
)
COPIES = tuple(ShardCopy("job", 2, 50, number, Tier.MEMORY, "a", 1, "d") for number in range(2))
BUSY = (host("a", job="job"), host("b", job="job"))
FREE = host("c", state=HostState.SPARE, since=NOW - 60)


def running(*, ran_s: float = 400.0, spec: JobSpec = SPEC, failures: tuple[PastFailure, ...] = ()) -> JobView:
    generation = msgspec.structs.replace(GENERATION, started_at=NOW - ran_s, furthest_step=-1)
    return msgspec.structs.replace(JOB, spec=spec, generation=generation, failures=failures)


def seen(*free: HostView, job: JobView | None = None, **more: Any) -> View:  # noqa: ANN401 - of the view
    return view(job=job or running(), hosts=(*BUSY, *free), copies=COPIES, **more)


def room(**more: Any) -> Incident:  # noqa: ANN401 - of Incident
    facts: dict[str, Any] = {
        "incident_id": "inc-1",
        "job": "job",
        "host_id": "",
        "cause": "room_to_grow",
        "state": IncidentState.DECIDING,
        "opened_at": NOW - 5,
        "since": NOW - 5,
        "message": "There is room.",
        "generation": 2,
        "failed_step": 50,
    }
    return Incident(**{**facts, **more})


def saved(**more: Any) -> ActionView:  # noqa: ANN401 - of ActionView
    plan = ActionPlan(SAVE, "job", SPEC, 2, stop_hosts=("a", "b"), emergency_step=54)
    return action(plan=plan, phase="flush", restore_step=None, **more)


def after_save(*free: HostView, **more: Any) -> Outcome:  # noqa: ANN401 - of ActionView
    parked = room(action_id="act-1", decisions_made=1)
    return decide(seen(*free, incidents=[parked], actions=[saved(**more)]), [], SETTINGS, NOW)


def test_all_ranks_save_before_the_world_grows() -> None:
    outcome = decide(seen(FREE), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (SAVE, "save_before_the_world_grows")
    assert (decision.evidence["gain_gpu_s"], decision.evidence["cost_gpu_s"]) == (3600.0, 40.0)
    assert decision.action is not None and decision.action.warm_hosts == ("c",)
    (course,) = (course for course in decision.alternatives if course.kind is HOLD)
    assert course.expected_cost_gpu_s == 3600.0
    (incident,) = outcome.incidents
    assert (incident.cause, incident.failed_step, incident.state) == ("room_to_grow", 50, IncidentState.ACTING)


FAILED_SAVE = PastFailure(2, "room_to_grow", "not_saved", f"{NOW:.0f}", -1)


@pytest.mark.parametrize(
    ("free", "job", "settings"),
    [
        (FREE, running(spec=msgspec.structs.replace(SPEC, max_nodes=0)), SETTINGS),  # it has all that it asked for
        (FREE, running(), PolicySettings(grow=False)),
        (FREE, running(ran_s=299.0), SETTINGS),  # it has just been restarted
        (msgspec.structs.replace(FREE, since=NOW - 29), running(), SETTINGS),  # is it there to stay?
        (msgspec.structs.replace(FREE, state=HostState.CORDONED), running(), SETTINGS),
        (msgspec.structs.replace(FREE, job="other"), running(), SETTINGS),
        (msgspec.structs.replace(FREE, stale_jobs={"job": 1}), running(), SETTINGS),
        (FREE, running(failures=(FAILED_SAVE,)), SETTINGS),  # it could not save a moment ago
        (FREE, running(spec=msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(every_steps=0))), SETTINGS),
    ],
)
def test_when_a_job_stays_as_it_is(free: HostView, job: JobView, settings: PolicySettings) -> None:
    outcome = decide(seen(free, job=job), [], settings, NOW)
    assert not outcome.decisions or outcome.decisions[0].kind is DecisionKind.CORDON
    assert not [incident for incident in outcome.incidents if incident.cause == "room_to_grow"]


@pytest.mark.parametrize(("ran_s", "since_s", "wake_s"), [(290.0, 60.0, 10.0), (400.0, 25.0, 5.0), (290.0, 15.0, 15.0)])
def test_the_next_look_is_when_the_wait_is_over(ran_s: float, since_s: float, wake_s: float) -> None:
    free = msgspec.structs.replace(FREE, since=NOW - since_s)
    assert decide(seen(free, job=running(ran_s=ran_s)), [], SETTINGS, NOW).wake_at == NOW + wake_s


def test_a_host_that_another_job_waits_for_or_keeps_is_not_taken() -> None:
    spared = msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, job="other", spares=1, max_nodes=0))
    both = msgspec.structs.replace(seen(FREE), jobs=(spared, running()))
    assert not [d for d in decide(both, [], SETTINGS, NOW).decisions if d.job == "job"]


def test_a_larger_generation_goes_on_from_the_saved_step() -> None:
    decision = decided(after_save(FREE))
    assert (decision.kind, decision.rule) == (GROW, "grow_onto_free_hosts")
    plan = decision.action
    assert plan is not None and plan.next is not None
    assert [(part.host_id, part.ranks) for part in plan.next.hosts] == [("a", (0,)), ("b", (1,)), ("c", (2,))]
    assert (plan.spec.nnodes, plan.spec.max_nodes, plan.stop_hosts) == (3, 0, ("a", "b"))
    assert plan.next.parent_lineage == (LineageEntry(1, 40, world_size=2), LineageEntry(2, world_size=2))
    assert world_size_of(2, plan.next.parent_lineage, of_job=3) == 2


def test_parked_ranks_are_released_if_the_host_is_gone() -> None:
    assert decided(after_save()).kind is RESUME


@pytest.mark.parametrize("free", [(), (FREE,), (FREE, host("d", state=HostState.SPARE, since=NOW - 60))])
@pytest.mark.parametrize(
    "leaves",
    [
        {"drain": DrainView(DrainState.REQUESTED, NOW - 1, NOW + 1800)},
        {"preempt_deadline_at": NOW + 25},
        {"preempt_deadline_at": NOW + 8},
    ],
)
def test_a_host_that_must_be_left_meanwhile_waits_for_the_next_round(
    leaves: dict[str, Any], free: tuple[HostView, ...]
) -> None:
    parked = room(action_id="act-1", decisions_made=1)
    hosts = (host("a", job="job"), host("b", job="job", **leaves), *free)
    seen_ = view(job=running(), hosts=hosts, copies=COPIES, incidents=[parked], actions=[saved()])
    outcome = decide(seen_, [], SETTINGS, NOW)
    growing, leaving = outcome.decisions
    assert growing.kind is (GROW if free else RESUME)
    assert (leaving.kind, leaving.action) == (HOLD, None)
    assert NOW < outcome.wake_at <= NOW + 1.0


def test_a_save_that_failed_is_tried_again_each_time_after_twice_as_long() -> None:
    outcome = after_save(FREE, state=ActionState.FAILED, message="b could not save")
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (RESUME, "give_up_after_a_failed_save")
    assert outcome.incidents[-1].state is IncidentState.ESCALATED
    assert [change.failure for change in outcome.jobs if change.failure] == [FAILED_SAVE]
    for number in (1, 2):
        again_s = SETTINGS.grow_cooldown_s * 2**number
        for ago_s, is_tried in ((again_s - 1.0, False), (again_s, True)):
            failed = msgspec.structs.replace(FAILED_SAVE, error_message=f"{NOW - ago_s:.0f}")
            job = running(failures=(failed,) * number, ran_s=2000.0)
            assert bool(decide(seen(FREE, job=job), [], SETTINGS, NOW).incidents) is is_tried, (number, ago_s)
    often = room(decisions_made=SETTINGS.max_decisions_per_incident)
    assert decided(decide(seen(FREE, incidents=[often]), [], SETTINGS, NOW)).rule == "give_up_after_a_failed_save"


def test_growing_that_costs_more_than_it_gains_is_over_with_both_numbers() -> None:
    outcome = decide(seen(FREE), [], PolicySettings(grow_horizon_s=30.0), NOW)
    decision, (incident,) = decided(outcome), outcome.incidents
    assert (decision.kind, decision.rule, decision.action) == (HOLD, "stay_if_growing_costs_more", None)
    assert (incident.state, incident.message) == (IncidentState.RESOLVED, decision.reason)
    assert [change.failure for change in outcome.jobs] == [NOT_WORTH_IT]


NOT_WORTH_IT = PastFailure(2, "room_to_grow", "not_worth_it", "gain 30, cost 40", -1)
MORE = host("d", state=HostState.SPARE, since=NOW - 60)


@pytest.mark.parametrize(
    ("free", "job", "settings", "rule"),
    [
        ((FREE,), running(failures=(NOT_WORTH_IT,)), PolicySettings(grow_horizon_s=30.0), ""),
        ((FREE,), running(failures=(NOT_WORTH_IT,)), SETTINGS, "save_before_the_world_grows"),
        (
            (FREE, MORE),
            running(spec=msgspec.structs.replace(SPEC, max_nodes=4), failures=(NOT_WORTH_IT,)),
            PolicySettings(grow_horizon_s=30.0),
            "save_before_the_world_grows",  # 60 rank seconds for 40
        ),
        (
            (FREE,),
            running(failures=(msgspec.structs.replace(NOT_WORTH_IT, generation=1),)),
            PolicySettings(grow_horizon_s=30.0),
            "stay_if_growing_costs_more",  # an earlier generation's entry
        ),
    ],
)
def test_what_was_not_worth_it_is_weighed_again_when_its_numbers_change(
    free: tuple[HostView, ...], job: JobView, settings: PolicySettings, rule: str
) -> None:
    assert [decision.rule for decision in decide(seen(*free, job=job), [], settings, NOW).decisions] == [rule] * bool(
        rule
    )


def test_recoveries_that_are_known_later_do_not_open_it_again() -> None:
    """They change the cost in the reason, and not what the record is compared by."""
    settings = PolicySettings(grow_horizon_s=30.0)
    job = msgspec.structs.replace(running(), recoveries=(PastRecovery(GROW, 50.0),))
    outcome = decide(seen(FREE, job=job, incidents=[room()]), [], settings, NOW)
    assert [change.failure for change in outcome.jobs] == [NOT_WORTH_IT]


def test_an_incident_that_only_waits_ends_when_the_job_is_not_to_grow_any_more() -> None:
    held = room(holding_for="more hosts, or an end of the generation")
    (closed,) = decide(seen(FREE, incidents=[held]), [], PolicySettings(grow=False), NOW).incidents
    assert closed.state is IncidentState.RESOLVED


@pytest.mark.parametrize("cause", ["room_to_grow", "host_condition", "drain_requested", "preemption_notice"])
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTORING])
def test_a_planned_move_whose_ranks_do_not_train_in_time_is_tried_again(cause: str, phase: Phase) -> None:
    """Not only one that failed: nobody else sees these ranks for ten minutes."""
    parts = tuple(HostRanks(name, "10.0.0.1", f"{name}:7", (number,)) for number, name in enumerate("ac"))
    moved = msgspec.structs.replace(
        GENERATION,
        generation=3,
        hosts=parts,
        started_at=NOW - 400,
        restore_step=50,
        ranks=(rank(0, "a", phase=phase), rank(1, "c", phase=phase)),
    )
    kind = GROW if cause == "room_to_grow" else DecisionKind.MIGRATE_TO_SPARE
    plan = ActionPlan(kind, "job", JOB.spec, 2, next=GenerationPlan("job", 3, 2, parts, {}, (), 1))
    opened = room(cause=cause, host_id="b", state=IncidentState.VERIFYING, action_id="act-1", since=NOW - 350)
    hosts = (host("a", job="job"), host("b"), host("c", job="job"))
    job = msgspec.structs.replace(JOB, generation=moved)
    done = action(plan=plan, restore_step=50)
    outcome = decide(view(job=job, hosts=hosts, incidents=[opened], actions=[done]), [], SETTINGS, NOW)
    again = decided(outcome)
    assert (again.kind, again.action and again.action.generation) == (DecisionKind.RESTART_IN_PLACE, 3)


def test_ranks_that_start_are_waited_for() -> None:
    job = running()
    assert job.generation is not None
    ranks = (rank(0, "a"), rank(1, "b", phase=GENERATION.ranks[0].phase.__class__.STARTING))
    job = msgspec.structs.replace(job, generation=msgspec.structs.replace(job.generation, ranks=ranks))
    assert decided(decide(seen(FREE, job=job), [], SETTINGS, NOW)).rule == "wait_until_all_ranks_step"


def test_a_host_that_goes_before_anything_is_done_ends_the_matter() -> None:
    outcome = decide(seen(incidents=[room()]), [], SETTINGS, NOW)
    assert not outcome.decisions and outcome.incidents[0].state is IncidentState.RESOLVED


def test_a_failure_takes_the_free_host_with_its_restart() -> None:
    outcome = decide(seen(FREE, incidents=[room()]), [say(KILLED)], SETTINGS, NOW)
    (decision,) = (d for d in outcome.decisions if d.action is not None)
    assert (decision.kind, decision.rule) == (GROW, "restart_on_more_hosts")
    assert decision.incident_id != "inc-1"


def test_a_larger_generation_that_did_not_start_is_started_again() -> None:
    parts = tuple(HostRanks(name, "ip", f"{name}:7", (n,)) for n, name in enumerate("abc"))
    granted = GenerationPlan("job", 2, 1, parts, {}, (), restart_count=1)
    plan = ActionPlan(GROW, "job", SPEC.on(3), 1, stop_hosts=("a", "b"), next=granted)
    generation = msgspec.structs.replace(GENERATION, hosts=parts, started_at=0.0, ranks=(), restore_step=None)
    job = msgspec.structs.replace(JOB, spec=SPEC.on(3), generation=generation)
    failed = action(plan=plan, state=ActionState.FAILED, phase="start", message="c could not start")
    incident = room(generation=1, action_id="act-1", decisions_made=1)
    hosts = (*BUSY, host("c", job="job"))
    outcome = decide(view(job=job, hosts=hosts, incidents=[incident], actions=[failed]), [], SETTINGS, NOW)
    (plan,) = (d.action for d in outcome.decisions if d.action is not None)
    assert (plan.kind, plan.spec.nnodes) == (DecisionKind.RESTART_IN_PLACE, 3)


def test_an_approval_of_the_growth_comes_before_the_save() -> None:
    decision = decided(decide(seen(FREE), [], PolicySettings(approve=(GROW,)), NOW))
    assert (decision.rule, decision.evidence["wanted"]) == ("wait_for_approval", "grow")
    assert running().state is JobState.RUNNING
