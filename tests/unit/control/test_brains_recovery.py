"""Rules for a generation that failed: restart in place, a spare, an older recovery point, or the end of the job."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    KILLED,
    NOW,
    SAVED,
    SEEN_BEFORE,
    SETTINGS,
    SPEC,
    STOPPED,
    action,
    decided,
    exited,
    host,
    incident,
    rank,
    say,
    view,
    with_exit,
)

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobState, Phase, WorkerError
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.identity import run_id
from flyball.contracts.reports.signals import HostSilent, WorkerExited
from services.controller.round import given_up
from services.controller.round.round import Case, Round
from services.controller.round.view import HostView, JobView, Outcome, PastFailure


def test_a_killed_worker_restarts_in_place() -> None:
    outcome = decide(view(copies=SAVED), [say(KILLED, source="b")], SETTINGS, NOW)
    decision = decided(outcome)
    assert decision.rule == "restart_in_place" and decision.incident_id == "inc-7" and decision.decision_id == "dec-70"
    plan = decision.action
    assert plan is not None and plan.next is not None
    assert (plan.generation, plan.stop_hosts, plan.next.generation, plan.next.parent) == (2, ("a", "b"), 3, 2)
    assert plan.next.parent_lineage == GENERATION.lineage and plan.next.restart_count == 2
    assert plan.next.run == run_id(JOB.submitted_at)  # of all generations of the job
    (opened,) = outcome.incidents
    assert (opened.cause, opened.state, opened.action_id, opened.failed_step) == (
        "worker_killed",
        IncidentState.ACTING,
        "act-70",
        50,
    )
    assert outcome.jobs[0].failure is not None and outcome.jobs[0].failure.cause == "worker_killed"


def test_a_silent_host_is_replaced() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
    outcome = decide(view(), [silent], SETTINGS, NOW)
    decision = decided(outcome)
    plan = decision.action
    assert plan is not None and plan.next is not None
    assert (plan.stop_hosts, plan.unreachable_hosts) == (("a",), ("b",))
    assert [(part.host_id, part.ranks) for part in plan.next.hosts] == [("a", (0,)), ("c", (1,))]
    assert plan.next.restart_count == 1 and "c" in plan.warm_hosts
    assert outcome.hosts[0].state is HostState.SILENT


def came_back_empty(*numbers: int) -> JobView:
    ranks = tuple(msgspec.structs.replace(r, is_gone=r.rank in numbers) for r in GENERATION.ranks)
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def test_ranks_that_a_newer_daemon_of_their_host_does_not_know_have_failed() -> None:
    decision = decided(decide(view(job=came_back_empty(1), copies=SAVED), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "restart_in_place")
    assert decided(decide(view(job=came_back_empty(0, 1)), [], SETTINGS, NOW)).rule == "restart_in_place"
    assert (
        decide(view(job=came_back_empty(1)), [say(exited(0, error="Connection reset by peer"))], SETTINGS, NOW)
        .incidents[0]
        .cause
        == "host_restarted"
    )


def test_a_worker_whose_end_a_restarted_daemon_told_has_failed_by_that() -> None:
    ranks = (GENERATION.ranks[0], msgspec.structs.replace(GENERATION.ranks[1], is_gone=True, exited=KILLED))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    assert decide(view(job=job), [], SETTINGS, NOW).incidents[0].cause == "worker_killed"


@pytest.mark.parametrize(("step", "known"), [(-1, 47), (3, 3)])
def test_a_generation_that_made_no_step_cuts_no_history_off(step: int, known: int) -> None:
    """It was to begin from scratch on a spare that was dead, while the holder of step 47 could not be reached."""
    ranks = (rank(0, "a", step=step, phase=Phase.STARTING), rank(1, "b", step=step, phase=Phase.STARTING))
    generation = msgspec.structs.replace(
        GENERATION, lineage=(LineageEntry(2),), parent_lineage=(LineageEntry(1),), restore_step=None, ranks=ranks
    )
    held = [ShardCopy("job", 1, 47, number, Tier.MEMORY, "c", 1, "x") for number in (0, 1)]
    held += [ShardCopy("job", 2, 3, number, Tier.MEMORY, "ab"[number], 1, "x") for number in (0, 1) if step >= 3]
    job = msgspec.structs.replace(JOB, generation=generation)
    killed = msgspec.structs.replace(KILLED, last_step=step)
    (decision,) = decide(view(job=job, copies=held), [say(killed)], SETTINGS, NOW).decisions
    assert decision.action is not None and decision.action.next is not None
    plan = decision.action.next
    assert plan.known_step == known
    # It may have made steps that nobody reported, since reports wait while the bus is away.
    may_count = (LineageEntry(1), LineageEntry(2, after_step=-1))
    assert plan.parent_lineage == (may_count if step < 0 else (LineageEntry(2),))


def test_a_restart_asks_a_host_that_the_job_has_left_if_it_holds_more() -> None:
    """b's memory went with its restart; c had been left by the job, and still has what a and b do not have together."""
    held = [ShardCopy("job", 1, 30, number, Tier.MEMORY, "c", 1, "x") for number in (0, 1)]
    outcome = decide(view(job=came_back_empty(1), copies=held), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None and plan.next is not None
    assert (plan.stop_hosts, plan.next.known_step) == (("a", "b", "c"), 30)
    newer = [msgspec.structs.replace(copy, step=35, host_id="a") for copy in held]
    plan = decided(decide(view(job=came_back_empty(1), copies=held + newer), [], SETTINGS, NOW)).action
    assert plan is not None and plan.stop_hosts == ("a", "b"), "nobody else is waited for"


def test_a_spare_takes_the_place_of_the_lost_host_among_the_peers() -> None:
    ring = {"a": ("e",), "e": ("b",), "b": ("d",), "d": ("a",)}  # not the ring that would be made anew
    parts = tuple(HostRanks(name, "10.0.0.1", f"{name}:7", (number,)) for number, name in enumerate("abde"))
    ranks = tuple(rank(number, name) for number, name in enumerate("abde"))
    generation = msgspec.structs.replace(GENERATION, hosts=parts, peers=ring, ranks=ranks)
    job = msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, nnodes=4), generation=generation)
    hosts = (*(host(name, job="job") for name in "abde"), host("c"))
    silent = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
    plan = decided(decide(view(job=job, hosts=hosts), [silent], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None
    assert plan.next.peers == {"a": ("e",), "e": ("c",), "c": ("d",), "d": ("a",)}


def test_a_silent_host_supersedes_a_restart_that_waits_for_it() -> None:
    generation = msgspec.structs.replace(GENERATION, started_at=0.0, ranks=(), restore_step=None)
    job = msgspec.structs.replace(JOB, generation=generation)
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    stopping = action(state=ActionState.DISPATCHED, phase="stop", positions={"0": 51}, restore_step=None)
    outcome = decide(view(job=job, incidents=[incident()], actions=[stopping]), [silent], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE
    assert outcome.superseded_actions == ("act-1",)
    (same,) = outcome.incidents
    assert same.incident_id == "inc-1" and same.cause == "host_silent" and same.decisions_made == 2
    plan = decided(outcome).action
    assert plan is not None and plan.next is not None
    assert (plan.next.generation, plan.next.parent, plan.next.restart_count) == (3, 1, 1)


def test_an_identical_exception_fails_the_job() -> None:
    past = PastFailure(1, "worker_exception", "ValueError", "boom at 0x7f01", 50)
    job = msgspec.structs.replace(JOB, failures=(past,))
    outcome = decide(view(job=job), [say(exited(error="boom at 0xdead"))], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_on_identical_exception"
    assert outcome.jobs[-1].state is JobState.FAILING
    assert outcome.incidents[-1].state is IncidentState.ESCALATED
    other = decide(view(job=job), [say(exited(error="another"))], SETTINGS, NOW)
    assert decided(other).kind is DecisionKind.RESTART_IN_PLACE


def test_an_identical_exception_before_the_first_step_fails_the_job() -> None:
    generation = msgspec.structs.replace(
        GENERATION, restore_step=None, ranks=(rank(0, "a", step=-1), rank(1, "b", step=-1))
    )
    past = PastFailure(1, "worker_exception", "ValueError", "boom", -1)
    job = msgspec.structs.replace(JOB, generation=generation, failures=(past,))
    ended = say(msgspec.structs.replace(exited(), last_step=-1))
    assert decided(decide(view(job=job), [ended], SETTINGS, NOW)).rule == "fail_on_identical_exception"


@pytest.mark.parametrize(
    ("ran_s", "error", "is_a_bug"),
    [
        (20.0, WorkerError("ImportError", "no module"), True),
        (700.0, WorkerError("ImportError", "no module"), False),
        (20.0, None, False),
    ],
    ids=["an exception", "after it had trained for long", "an exit code only"],
)
def test_an_exception_of_a_script_that_showed_no_step_comes_twice_before_the_first_step(
    ran_s: float, error: WorkerError | None, is_a_bug: bool
) -> None:
    def fails(job: JobView, generation: int) -> Outcome:
        starting = tuple(rank(n, name, step=-1, phase=Phase.STARTING, at=NOW) for n, name in enumerate("ab"))
        present = msgspec.structs.replace(
            GENERATION,
            generation=generation,
            restore_step=None,
            ranks=starting,
            started_at=NOW - ran_s,
            furthest_step=-1,
        )
        failing = msgspec.structs.replace(job, generation=present)
        ended = msgspec.structs.replace(exited(generation=generation), last_step=-1, error=error)
        return decide(view(job=failing, hosts=HOSTS[:2]), [say(ended)], SETTINGS, NOW)

    first = fails(JOB, 2)
    assert decided(first).kind is DecisionKind.RESTART_IN_PLACE
    failures = tuple(change.failure for change in first.jobs if change.failure is not None)
    again = decided(fails(msgspec.structs.replace(JOB, failures=failures), 3))
    assert again.rule == ("fail_on_identical_exception" if is_a_bug else "restart_in_place")


def out_of_gpu_memory(tried: str) -> WorkerExited:
    text = f"CUDA out of memory. Tried to allocate {tried}. Including non-PyTorch memory, this process has 15.48 GiB "
    return msgspec.structs.replace(exited(), error=WorkerError("OutOfMemoryError", f"{text}memory in use."))


def test_a_lack_of_gpu_memory_at_the_same_step_twice_fails_the_job_whatever_its_figures() -> None:
    past = PastFailure(1, "worker_exception", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 1 GiB.", 50)
    job = msgspec.structs.replace(JOB, failures=(past,))
    decision = decided(decide(view(job=job), [say(out_of_gpu_memory("2.00 GiB"))], SETTINGS, NOW))
    assert decision.rule == "fail_on_identical_exception"
    elsewhere = msgspec.structs.replace(JOB, failures=(msgspec.structs.replace(past, step=49),))
    again = decided(decide(view(job=elsewhere), [say(out_of_gpu_memory("2.00 GiB"))], SETTINGS, NOW))
    assert again.kind is DecisionKind.RESTART_IN_PLACE


def test_a_worker_killed_for_lack_of_memory_is_retried_once_without_progress() -> None:
    body = msgspec.structs.replace(KILLED, error_class="host_out_of_memory")
    assert decided(decide(view(), [say(body)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE
    past = PastFailure(1, "worker_killed", "host_out_of_memory", "", 50)
    again = msgspec.structs.replace(JOB, failures=(past,))
    decision = decided(decide(view(job=again), [say(body)], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.FAIL_JOB, "fail_on_repeated_lack_of_memory")
    assert decided(decide(view(job=again), [say(KILLED)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE
    progressed = msgspec.structs.replace(GENERATION, furthest_step=0)
    refilled = msgspec.structs.replace(again, generation=progressed)
    assert decided(decide(view(job=refilled), [say(body)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE


def on_b(generation: int = 1, host_id: str = "b") -> PastFailure:
    return PastFailure(generation, "worker_exception", "ValueError", "boom", 50, host_id)


def test_a_flaky_host_is_left_before_its_exception_is_blamed_on_the_job() -> None:
    job = msgspec.structs.replace(JOB, failures=(on_b(),))
    decision = decided(decide(view(job=job), [say(exited())], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "leave_the_host_of_an_identical_exception")
    assert decision.action is not None and decision.action.next is not None
    assert [part.host_id for part in decision.action.next.hosts] == ["a", "c"]


@pytest.mark.parametrize(
    ("failures", "hosts", "also_on_a"),
    [((on_b(host_id="a"),), HOSTS, False), ((on_b(),), HOSTS, True), ((on_b(),), HOSTS[:2], False)],
    ids=["on another host before", "on another host, too", "no spare"],
)
def test_the_same_exception_on_two_hosts_or_without_a_spare_fails_the_job(
    failures: tuple[PastFailure, ...], hosts: tuple[HostView, ...], also_on_a: bool
) -> None:
    job = msgspec.structs.replace(JOB, failures=failures)
    signals = [say(exited())]
    if also_on_a:
        signals.append(say(exited(0), at=NOW + 0.1, seq=2))
    assert decided(decide(view(job=job, hosts=hosts), signals, SETTINGS, NOW)).rule == "fail_on_identical_exception"


def test_a_step_that_cannot_be_restored_is_left_out_by_ranks_that_move_too() -> None:
    body = msgspec.structs.replace(exited(exit_code=23), error=WorkerError("RestoreFailed", "no source"))
    copies = [ShardCopy("job", 1, step, n, Tier.PERSISTENT, "", 10, "d") for step in (39, 40) for n in range(2)]
    leaves = (HOSTS[0], host("b", job="job", state=HostState.CORDONED), HOSTS[2])
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "restore_failed", "", "", -1),))
    decision = decided(decide(view(job=job, hosts=leaves, copies=copies), [say(body)], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "restart_from_an_older_recovery_point")
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.parent_lineage == (LineageEntry(1, 39), LineageEntry(2, 39))
    assert decision.action.next.known_step == 39


def test_a_job_that_fails_gets_no_grace_and_keeps_its_history() -> None:
    decision = decided(decide(view(job=SEEN_BEFORE), [say(exited())], SETTINGS, NOW))
    plan = decision.action
    assert plan is not None and plan.history is not None
    assert (plan.kind, plan.grace_s, plan.deadline_s, plan.generation) == (DecisionKind.FAIL_JOB, 0.0, 40.0, 2)
    assert plan.history.lineage == GENERATION.lineage and plan.emergency_step == -1
    durable = msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(every_steps=1, disk_dir="/d", disk_every_steps=9))
    job = msgspec.structs.replace(STOPPED, spec=durable)
    plan = decided(decide(view(job=job), [], SETTINGS, NOW)).action
    assert plan is not None and plan.deadline_s == 2.0 * durable.stop_grace_s + 40.0 + 60.0


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_restarts_are_used_up(limit: int) -> None:
    generation = msgspec.structs.replace(GENERATION, restart_count=limit)
    job = msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, max_restarts=limit), generation=generation)
    outcome = decide(view(job=job), [say(KILLED)], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_when_restarts_are_used_up"
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    assert decided(decide(view(job=job), [silent], SETTINGS, NOW)).kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_start_in_which_no_worker_failed_burns_no_restart() -> None:
    started = msgspec.structs.replace(GENERATION, restart_count=3, ranks=())
    job = msgspec.structs.replace(JOB, generation=started)
    late = action(state=ActionState.TIMED_OUT, message="b did not answer in phase start in time.")
    again = decided(decide(view(job=job, incidents=[incident()], actions=[late]), [], SETTINGS, NOW))
    assert again.kind is DecisionKind.RESTART_IN_PLACE
    assert again.action is not None and again.action.next is not None and again.action.next.restart_count == 3
    never = decide(view(job=job), [], SETTINGS, NOW)  # the job's first start: there is no incident yet
    assert never.incidents[0].cause == "start_overdue"
    assert decided(never).kind is DecisionKind.RESTART_IN_PLACE
    endless = incident(cause="start_overdue", decisions_made=8)
    bounded = decide(view(job=job, incidents=[endless], actions=[late]), [], SETTINGS, NOW)
    assert decided(bounded).rule == "fail_after_too_many_decisions"


def test_too_many_decisions_escalate() -> None:
    stuck = incident(state=IncidentState.DECIDING, generation=2, decisions_made=8, action_id="")
    outcome = decide(view(job=with_exit(KILLED), incidents=[stuck]), [], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_after_too_many_decisions"


@pytest.mark.parametrize(
    ("earlier", "made", "before"),
    [
        (PastFailure(1, "worker_exception", "ValueError", "boom", 47, "a"), 1, 7),  # another host, another step
        (PastFailure(1, "host_silent", "", "", 50, "a"), 1, 7),  # another host, another cause
        (PastFailure(1, "worker_exception", "ValueError", "no", 47, "b"), 8, 0),  # the same host
        (PastFailure(1, "worker_exception", "ValueError", "no", 50, "a"), 8, 0),  # alike on another host
        (PastFailure(1, "worker_exception", "ValueError", "no", 47), 8, 0),  # perhaps the same host
    ],
)
def test_a_fault_that_has_nothing_to_do_with_the_earlier_ones_has_decisions_of_its_own(
    earlier: PastFailure, made: int, before: int
) -> None:
    job = msgspec.structs.replace(JOB, failures=(earlier,))
    verifying = incident(state=IncidentState.VERIFYING, decisions_made=7)
    outcome = decide(view(job=job, incidents=[verifying], actions=[action()]), [say(exited())], SETTINGS, NOW)
    (same,) = outcome.incidents
    assert (same.incident_id, same.decisions_made, same.decisions_before) == ("inc-1", made, before)


def test_a_host_that_was_given_up_and_fails_then_is_no_second_failure() -> None:
    """Its note on the record is no failure, so the new one is compared with real ones only."""
    earlier = PastFailure(1, "worker_exception", "ValueError", "boom", 47, "a")
    noticed = incident(cause="preemption_notice", host_id="b")
    note = given_up.note_of(Case(Round(view(incidents=[noticed]), SETTINGS, NOW), JOB, noticed))
    assert note is not None and given_up.is_note(note)
    job = msgspec.structs.replace(JOB, failures=(earlier, note))
    verifying = incident(state=IncidentState.VERIFYING, decisions_made=7)
    outcome = decide(view(job=job, incidents=[verifying], actions=[action()]), [say(exited())], SETTINGS, NOW)
    assert [(same.decisions_made, same.decisions_before) for same in outcome.incidents] == [(1, 7)]


def test_independent_faults_without_a_new_step_come_to_an_end_too() -> None:
    limit = SETTINGS.max_decisions_per_incident
    facts = {"state": IncidentState.DECIDING, "generation": 2, "action_id": "", "decisions_made": 2}
    job = with_exit(KILLED)
    ends = incident(**facts, decisions_before=4 * limit - 2)
    decision = decided(decide(view(job=job, incidents=[ends]), [], SETTINGS, NOW))
    assert (decision.rule, decision.evidence["decisions"]) == ("fail_after_too_many_decisions", 4 * limit)
    last = incident(**facts, decisions_before=4 * limit - 3)
    assert decided(decide(view(job=job, incidents=[last]), [], SETTINGS, NOW)).rule == "restart_in_place"


def test_a_job_that_too_many_actions_did_not_help_says_why_the_last_one_failed() -> None:
    last = action(state=ActionState.FAILED, message="no host could list the copies", phase="list")
    facts = {"state": IncidentState.DECIDING, "generation": 2, "action_id": last.action_id}
    ends = incident(**facts, decisions_made=SETTINGS.max_decisions_per_incident)
    decision = decided(decide(view(job=with_exit(KILLED), incidents=[ends], actions=[last]), [], SETTINGS, NOW))
    assert decision.rule == "fail_after_too_many_decisions"


def test_a_new_step_gives_all_decisions_back() -> None:
    progressed = msgspec.structs.replace(GENERATION, furthest_step=0, restore_step=0)
    job = msgspec.structs.replace(JOB, generation=progressed)
    verifying = incident(state=IncidentState.VERIFYING, failed_step=90, decisions_made=7, decisions_before=20)
    (same,) = decide(view(job=job, incidents=[verifying], actions=[action()]), [say(KILLED)], SETTINGS, NOW).incidents
    assert (same.decisions_made, same.decisions_before) == (1, 0)


def test_a_failed_action_is_followed_by_another_with_growing_pauses() -> None:
    failed = action(state=ActionState.FAILED, message="b could not stop: no disk", phase="stop")
    generation = msgspec.structs.replace(GENERATION, started_at=0.0, ranks=(), restore_step=None)
    job = msgspec.structs.replace(JOB, generation=generation)
    first = decide(view(job=job, incidents=[incident()], actions=[failed]), [], SETTINGS, NOW)
    assert decided(first).kind is DecisionKind.RESTART_IN_PLACE
    later = decide(view(job=job, incidents=[incident(decisions_made=3)], actions=[failed]), [], SETTINGS, NOW)
    assert decided(later).rule == "back_off_after_a_failed_action" and later.wake_at == NOW + 1.0


def test_a_failed_restore_goes_to_an_older_point() -> None:
    def copy(step: int, number: int) -> ShardCopy:
        return ShardCopy("job", 1, step, number, Tier.MEMORY, "ab"[number], 10, "d")

    body = msgspec.structs.replace(exited(exit_code=23), error=WorkerError("RestoreFailed", "no source"))
    older = [copy(step, n) for step in (39, 40) for n in range(2)]
    decision = decided(decide(view(copies=older), [say(body)], SETTINGS, NOW))
    assert decision.rule == "restart_from_an_older_recovery_point"
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.parent_lineage == (LineageEntry(1, 39), LineageEntry(2, 39))
    assert decision.action.next.restart_count == 1
    none_older = decided(decide(view(copies=older[2:]), [say(body)], SETTINGS, NOW))
    assert none_older.rule == "restart_in_place"  # once more, before everything is given up
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "restore_failed", "", "", 40),))
    ended = decided(decide(view(job=job, copies=older[2:]), [say(body)], SETTINGS, NOW))
    assert (ended.rule, ended.kind) == ("fail_when_no_step_restores", DecisionKind.FAIL_JOB)


def test_after_a_migration_the_job_says_where_it_runs_now() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    outcome = decide(view(), [silent], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE
    assert outcome.jobs[-1].message == "running on a, c"
    assert outcome.jobs[-1].state is JobState.RUNNING
