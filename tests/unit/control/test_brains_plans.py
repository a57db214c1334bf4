"""Which hosts a plan asks, which actions a decision ends, and to which step a failed restore goes back."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.played_actions import begun

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, Incident, IncidentState
from services.actuator.rules.command_bodies import end_body, stop_body
from services.controller.round import plans
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import (
    ActionView,
    GenerationView,
    HostView,
    JobView,
    PastFailure,
    PolicySettings,
    RankView,
    View,
)
from services.controller.rules.recovery_rules import fail_after_too_many_decisions
from services.controller.rules.rollback_rules import fail_when_no_step_restores, restart_from_an_older_recovery_point

NOW = 10_000.0
SETTINGS = PolicySettings()
SPEC = JobSpec("job", ("t.py",), "/", nnodes=2, checkpoint=CheckpointSpec(every_steps=1), max_restarts=9)
GENERATION = GenerationView(
    generation=4,
    parent=2,
    lineage=(LineageEntry(2, 40), LineageEntry(4)),
    hosts=(HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,))),
    peers={},
    started_at=NOW - 100,
    restore_step=40,
    restart_count=1,
    ranks=(RankView(0, "a", 40, Phase.RESTORING, NOW), RankView(1, "b", 40, Phase.RESTORING, NOW)),
)
JOB = JobView(SPEC, JobState.RUNNING, NOW - 1000, False, GENERATION)
PLAN = ActionPlan(DecisionKind.RESTART_IN_PLACE, "job", SPEC, generation=2)
INCIDENT = Incident(
    "inc-1", "job", "b", "restore_failed", IncidentState.DECIDING, NOW, NOW, "Rank 1 could not restore.", 4
)


def host(name: str, state: HostState = HostState.HEALTHY, **more: object) -> HostView:
    facts = {"address": "ip", "failure_domain": name, "engine_address": f"{name}:7", "free_port": 1} | more
    return HostView(host_id=name, state=state, since=NOW - 500, last_report_at=NOW - 0.1, **facts)  # type: ignore[arg-type]  # a builder


def action(number: int, plan: ActionPlan, state: ActionState = ActionState.SUCCEEDED) -> ActionView:
    return ActionView(f"act-{number}", f"dec-{number}", "inc-1", plan, state, "stop", NOW - 10)


def case(
    *actions: ActionView,
    hosts: tuple[HostView, ...] = (host("a"), host("b"), host("c")),
    copies: tuple[ShardCopy, ...] = (),
    job: JobView = JOB,
    incident: Incident = INCIDENT,
) -> Case:
    view = View((job,), hosts, (incident,), actions, copies, next_incident=2, next_decision=5)
    return Case(Round(view, SETTINGS, NOW), job, incident)


def change(plan: ActionPlan, **changes: object) -> ActionPlan:
    return msgspec.structs.replace(plan, **changes)


# --- whom a plan asks ------------------------------------------------------------------------------------------------


def asked(case: Case) -> tuple[tuple[str, ...], tuple[str, ...]]:
    plan = plans.end_plan(case, DecisionKind.STOP_JOB, 0.0)
    return plan.stop_hosts, plan.unreachable_hosts


def test_hosts_of_earlier_actions_may_have_workers_too_and_each_is_asked_once() -> None:
    older = action(1, change(PLAN, stop_hosts=("c", "a"), unreachable_hosts=("d",)))
    saved = action(2, change(PLAN, kind=DecisionKind.EMERGENCY_CHECKPOINT, stop_hosts=("e", "c")))
    known = (host("a"), host("b"), host("c"), host("d"), host("e"))
    assert asked(case(older, saved, hosts=known)) == (("a", "b", "c", "d", "e"), ())
    assert asked(case(hosts=known)) == (("a", "b"), ())


def test_actions_of_other_jobs_and_those_that_end_strays_say_nothing_of_the_jobs_hosts() -> None:
    other = action(1, change(PLAN, job="other", stop_hosts=("c",), unreachable_hosts=("d",)))
    strays = action(2, change(PLAN, kind=DecisionKind.CORDON, stop_hosts=("c",), unreachable_hosts=("d",)))
    mine = action(3, change(PLAN, stop_hosts=("e",)))
    known = tuple(host(name) for name in "abcde")
    assert asked(case(other, strays, mine, hosts=known)) == (("a", "b", "e"), ()), "and those after it count"


def test_hosts_that_get_no_commands_are_told_apart_in_the_order_of_the_others() -> None:
    older = action(1, change(PLAN, stop_hosts=("c",), unreachable_hosts=("gone",)))
    known = (host("a", HostState.SILENT), host("b"), host("c", HostState.SUSPECT))
    assert asked(case(older, hosts=known)) == (("b",), ("a", "c", "gone"))


def test_a_job_lacks_ranks_only_if_a_host_of_its_present_generation_is_unreachable() -> None:
    older = action(1, change(PLAN, stop_hosts=("c",)))
    present = (host("a"), host("b"), host("c", HostState.SILENT))
    assert not plans.end_plan(case(older, hosts=present), DecisionKind.STOP_JOB, 0.0).lacks_ranks
    lost = (host("a"), host("b", HostState.SILENT), host("c"))
    assert plans.end_plan(case(older, hosts=lost), DecisionKind.STOP_JOB, 0.0).lacks_ranks


def test_a_host_that_was_given_up_is_asked_no_more_though_it_is_heard() -> None:
    plan = plans.restart_plan(
        case(), GENERATION, GENERATION.hosts, kind=DecisionKind.MIGRATE_TO_SPARE, incident=INCIDENT, given_up=("b",)
    )
    assert (plan.stop_hosts, plan.unreachable_hosts) == (("a",), ("b",))


# --- what a decision ends --------------------------------------------------------------------------------------------


def test_a_decision_ends_the_open_actions_of_its_job_alone_and_once() -> None:
    asks = case(
        action(1, PLAN, ActionState.DISPATCHED),
        action(2, PLAN, ActionState.SUCCEEDED),
        action(3, change(PLAN, job="other"), ActionState.DISPATCHED),
        action(4, change(PLAN, kind=DecisionKind.CORDON), ActionState.DISPATCHED),
        action(5, PLAN, ActionState.QUEUED),
    )
    round_ = asks.round
    round_.supersede_all("job")
    round_.supersede_all("job")
    assert round_.outcome().superseded_actions == ("act-1", "act-5")
    states = [one.state for one in round_.actions.values()]
    assert states == [
        ActionState.SUPERSEDED,
        ActionState.SUCCEEDED,
        ActionState.DISPATCHED,
        ActionState.DISPATCHED,
        ActionState.SUPERSEDED,
    ]
    assert list(round_.actions) == [f"act-{number}" for number in range(1, 6)]
    assert [one.action_id for one in round_.actions.values()] == list(round_.actions)
    assert list(round_.open_actions("job")) == []


def test_the_hosts_of_an_action_that_was_ended_are_free_for_other_jobs() -> None:
    asks = case(action(1, change(PLAN, stop_hosts=("c",)), ActionState.DISPATCHED))
    other = msgspec.structs.replace(SPEC, job="other")

    def free() -> list[str]:
        return [found.host_id for found in asks.round.free_hosts(other)]

    assert free() == ["a", "b"]
    asks.round.supersede_all("job")
    assert free() == ["a", "b", "c"]


# --- a restore that failed -------------------------------------------------------------------------------------------


def copies(*steps: int, job: str = "job", generation: int = 2) -> tuple[ShardCopy, ...]:
    return tuple(ShardCopy(job, generation, step, n, Tier.MEMORY, "ab"[n], 1, "d") for step in steps for n in (0, 1))


def older(case: Case) -> Verdict:
    verdict = restart_from_an_older_recovery_point(case)
    assert verdict is not None
    return verdict


def failed(*generations: int, cause: str = "restore_failed") -> JobView:
    failures = tuple(PastFailure(generation, cause, "", "", 40) for generation in generations)
    return msgspec.structs.replace(JOB, failures=failures)


def test_the_step_that_failed_is_left_out_of_the_history_and_the_one_before_it_named() -> None:
    verdict = older(case(copies=copies(38, 40)))
    assert "Step 40 is left out: generation 5 goes back to step 38." in verdict.reason
    assert verdict.plan is not None and verdict.plan.next is not None
    assert verdict.plan.next.parent_lineage == (LineageEntry(2, 39), LineageEntry(4, 39))
    assert (verdict.plan.next.known_step, verdict.kind) == (38, DecisionKind.RESTART_IN_PLACE)


@pytest.mark.parametrize(
    ("reached", "goal"),
    [(copies(30), "step 30"), ((), "the beginning, since no older step is complete on hosts in reach")],
)
def test_a_step_that_a_lost_host_took_along_is_not_named_as_the_goal(reached: tuple[ShardCopy, ...], goal: str) -> None:
    lost = tuple(msgspec.structs.replace(copy, host_id="gone") for copy in copies(39))
    verdict = older(case(copies=(*reached, *lost)))
    assert f"Step 40 is left out: generation 5 goes back to {goal}." in verdict.reason


@pytest.mark.parametrize(
    "held",
    [
        copies(40),  # the step itself
        copies(38, job="other"),
        copies(38)[:1],  # of rank 0 alone
        copies(38, generation=3),  # of a generation that is not in the history
    ],
)
def test_without_an_older_step_of_all_ranks_it_is_tried_once_more(held: tuple[ShardCopy, ...]) -> None:
    assert restart_from_an_older_recovery_point(case(copies=held)) is None


def stored(*steps: int) -> tuple[ShardCopy, ...]:
    return tuple(msgspec.structs.replace(copy, tier=Tier.PERSISTENT, host_id="") for copy in copies(*steps))


def after_cut(upto_step: int | None) -> JobView:
    """Generations 3 and 4 could not restore; 4 was to go on from steps up to this one."""
    history = (LineageEntry(2, upto_step), LineageEntry(3, upto_step))
    generation = msgspec.structs.replace(GENERATION, parent_lineage=history)
    return msgspec.structs.replace(failed(3, 4), generation=generation)


@pytest.mark.parametrize(
    ("held", "job", "is_left_out"),
    [
        (stored(38, 40), failed(4), False),
        (stored(38, 40), failed(4, 4), False),  # two ranks of one attempt
        (stored(38, 40), after_cut(41), False),  # generation 3 was to restore step 42
        (stored(38, 40), after_cut(None), True),
        (stored(38, 40) + copies(38), failed(4), True),  # the older step is in memory
        (stored(38, 40) + copies(40), failed(4), True),  # not for the store's sake
    ],
)
def test_a_step_in_the_store_is_tried_twice_before_an_older_one_there(
    held: tuple[ShardCopy, ...], job: JobView, is_left_out: bool
) -> None:
    """A host cut off from the store could restore none of its steps, and the job gave up one after the other."""
    assert (restart_from_an_older_recovery_point(case(copies=held, job=job)) is not None) is is_left_out


def test_a_job_that_goes_on_after_its_end_must_find_the_recovery_point_that_was_reported() -> None:
    """Hosts that list nothing now are no reason to start from scratch."""
    again = msgspec.structs.replace(JOB, state=JobState.SUBMITTED, generation=None, before=GENERATION)
    for held, step in ((copies(38, 40), 40), (stored(38), 38), (copies(40)[:1], -1), ((), -1)):
        plan = plans.start_plan(case(copies=held, job=again), GENERATION.hosts)
        assert plan.next is not None and plan.next.known_step == step
    never_ran = plans.start_plan(
        case(copies=copies(40), job=msgspec.structs.replace(again, before=None)), GENERATION.hosts
    )
    assert never_ran.next is not None and never_ran.next.known_step == -1


# --- a restore that failed, and no other step -----------------------------------------------------------------------

LOST = msgspec.structs.replace(host("b", HostState.SILENT), job="job", since=NOW - 1, last_report_at=NOW - 10)
AWAY = (host("a"), LOST, host("c"))


def with_reasons(*failures: tuple[int, int, str], **generation: object) -> JobView:
    """(generation, step, why)"""
    records = tuple(PastFailure(number, "restore_failed", "RestoreFailed", why, at) for number, at, why in failures)
    running = msgspec.structs.replace(GENERATION, **generation)
    return msgspec.structs.replace(JOB, failures=records, generation=running)


ONCE = with_reasons((4, 40, "digest differs."))
TWICE = with_reasons((3, 40, "digest differs."), (4, 40, "digest differs."))


@pytest.mark.parametrize("held", [(), copies(40), copies(40)[:1], stored(40)], ids=["dropped", "all", "part", "store"])
def test_a_job_of_which_no_step_restores_fails_after_a_second_attempt_and_keeps_its_copies(
    held: tuple[ShardCopy, ...],
) -> None:
    verdict = fail_when_no_step_restores(case(copies=held, job=TWICE))
    assert verdict is not None and verdict.plan is not None
    assert (verdict.kind, verdict.job_state) == (DecisionKind.FAIL_JOB, JobState.FAILING)
    assert verdict.plan.keep_memory and verdict.plan.next is None
    assert "All copies stay where they are" in verdict.reason and "--fresh" in verdict.reason


@pytest.mark.parametrize(("cause", "stay"), [("restore_failed", True), ("worker_killed", False)])
def test_however_a_job_fails_whose_steps_cannot_be_restored_its_copies_stay(cause: str, *, stay: bool) -> None:
    ends = msgspec.structs.replace(INCIDENT, cause=cause, decisions_made=SETTINGS.max_decisions_per_incident)
    verdict = fail_after_too_many_decisions(case(copies=copies(40), incident=ends))
    assert verdict is not None and verdict.plan is not None
    assert (verdict.plan.keep_memory, "All copies stay where they are" in verdict.reason) == (stay, stay)


def test_copies_that_stay_are_neither_freed_nor_written_to_slower_tiers() -> None:
    checkpoint = CheckpointSpec(every_steps=1, disk_dir="/d", disk_every_steps=1)
    ends = change(PLAN, kind=DecisionKind.FAIL_JOB, spec=msgspec.structs.replace(SPEC, checkpoint=checkpoint))
    for stay in (False, True):
        plan = change(ends, keep_memory=stay)
        assert (stop_body(plan).durable, end_body(begun(plan)).keep_memory) == (not stay, stay)


def test_each_step_that_was_tried_is_named_with_its_reason() -> None:
    tried = with_reasons(
        (1, 50, "of a time long ago"), (2, 44, "the store: digest differs"), (4, 40, "rank 1 has none")
    )
    trained = (PastFailure(1, "worker_killed", "", "", 48),)
    job = msgspec.structs.replace(tried, failures=(*tried.failures[:1], *trained, *tried.failures[1:]))
    verdict = fail_when_no_step_restores(case(job=msgspec.structs.replace(job, generation=unstarted(())), copies=()))
    assert verdict is not None
    assert "Before, it was the same with step 44 (the store: digest differs)." in verdict.reason
    assert "long ago" not in verdict.reason and verdict.evidence["steps_tried"] == "40,44"


def unstarted(history: tuple[LineageEntry, ...]) -> GenerationView:
    """Generation 5 was to restore again, but no host listed the step any more."""
    return msgspec.structs.replace(
        GENERATION, generation=5, lineage=(), parent_lineage=history, started_at=0.0, restore_step=None, ranks=()
    )


@pytest.mark.parametrize(("held", "fails"), [((), True), (copies(40), False), (copies(38), False)])
def test_a_second_attempt_that_found_nothing_to_start_from_is_the_last(
    held: tuple[ShardCopy, ...], fails: bool
) -> None:
    job = msgspec.structs.replace(ONCE, generation=unstarted((LineageEntry(2, 40), LineageEntry(4))))
    assert (fail_when_no_step_restores(case(copies=held, job=job)) is not None) is fails


def tried_42_before() -> JobView:
    failures = with_reasons((3, 42, ""), (4, 40, "")).failures
    return msgspec.structs.replace(after_cut(41), failures=failures)


def test_the_second_attempt_starts_with_the_step_or_not_at_all() -> None:
    """A copy that did not verify is listed no more; nor is that of an engine which comes back in a moment."""
    for held in ((), copies(40)[:1]):
        verdict = fail_when_no_step_restores(case(copies=held, job=ONCE))
        assert verdict is not None and verdict.plan is not None and verdict.plan.next is not None
        assert (verdict.kind, verdict.plan.next.known_step) == (DecisionKind.RESTART_IN_PLACE, 40)
    listed = case(copies=copies(40), job=tried_42_before())
    for rule in (fail_when_no_step_restores, restart_from_an_older_recovery_point):
        assert rule(listed) is None, "any restart restores it"
    never = msgspec.structs.replace(ONCE, spec=msgspec.structs.replace(SPEC, never_from_scratch=True), newest_step=41)
    view = View((never,), (host("a"), host("b")), (INCIDENT,), (), (), next_incident=2, next_decision=5)
    (decision,) = decide(view, [], SETTINGS, NOW).decisions
    assert decision.rule == "fail_when_no_step_restores", "and --never-from-scratch does not wait for ever"


@pytest.mark.parametrize(
    ("held", "fails"),
    [((), False), (copies(40), False), (stored(40), True)],
)
def test_memory_that_may_be_lost_with_its_host_is_waited_for_and_then_given_up_aloud(
    held: tuple[ShardCopy, ...], fails: bool
) -> None:
    assert (fail_when_no_step_restores(case(copies=held, job=TWICE, hosts=AWAY)) is not None) is fails
    view = View((TWICE,), AWAY, (INCIDENT,), (), held, next_incident=2, next_decision=5)
    (decision,) = decide(view, [], SETTINGS, NOW).decisions
    assert decision.kind is not DecisionKind.FAIL_JOB, "the lost host is the cause now, and is replaced first"
    assert fails or "the job starts over" in decision.reason or "to go on without it would give up" in decision.reason


def test_an_older_step_other_failures_and_ranks_that_restored_nothing_are_left_to_other_rules() -> None:
    assert fail_when_no_step_restores(case(copies=copies(38, 40), job=TWICE)) is None
    killed = msgspec.structs.replace(INCIDENT, cause="worker_killed")
    assert fail_when_no_step_restores(case(job=TWICE, incident=killed)) is None
    assert fail_when_no_step_restores(case(job=with_reasons((4, 40, ""), restore_step=None))) is None


def test_other_failures_and_those_of_other_generations_leave_no_step_out() -> None:
    held = copies(38, 40)
    for incident in (
        msgspec.structs.replace(INCIDENT, cause="worker_killed"),
        msgspec.structs.replace(INCIDENT, generation=3),
    ):
        assert restart_from_an_older_recovery_point(case(copies=held, incident=incident)) is None
    fresh = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, restore_step=None))
    assert restart_from_an_older_recovery_point(case(copies=held, job=fresh)) is None
    first = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, restore_step=0))
    assert restart_from_an_older_recovery_point(case(copies=copies(0), job=first)) is None
