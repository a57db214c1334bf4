"""The policy's rules, one situation each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase, WorkerError
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Decision,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.identity import run_id
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import (
    EngineRestarted,
    HostReturned,
    HostSilent,
    PeerUnreachable,
    PreemptionNotice,
    RankStalled,
    SaveFailed,
    Signal,
    SignalBody,
    WorkerExited,
    WorkerStartFailed,
)
from services.controller.round.view import (
    ActionView,
    DrainView,
    GenerationView,
    HostView,
    JobView,
    Outcome,
    PastFailure,
    PolicySettings,
    RankView,
    View,
)
from tests.checked_rules import decide

NOW = 10_000.0
SETTINGS = PolicySettings()
SPEC = JobSpec(
    job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, checkpoint=CheckpointSpec(every_steps=1)
)


def host(name: str, *, state: HostState = HostState.HEALTHY, job: str = "", **more: object) -> HostView:
    facts = {"since": NOW - 500, "last_report_at": NOW - 0.1, "failure_domain": f"rack-{name}", "free_port": 29_500}
    return HostView(
        host_id=name,
        state=state,
        address="10.0.0.1",
        engine_address=f"{name}:7",
        job=job,
        **{**facts, **more},  # type: ignore[arg-type]  # a builder
    )


def rank(number: int, on: str, *, step: int = 50, phase: Phase = Phase.STEP, at: float = NOW - 0.1) -> RankView:
    return RankView(number, on, step, phase, at)


GENERATION = GenerationView(
    generation=2,
    parent=1,
    lineage=(LineageEntry(1, 40), LineageEntry(2)),
    hosts=(HostRanks("a", "10.0.0.1", "a:7", (0,)), HostRanks("b", "10.0.0.1", "b:7", (1,))),
    peers={"a": ("b",), "b": ("a",)},
    started_at=NOW - 100,
    restore_step=40,
    restart_count=1,
    ranks=(rank(0, "a"), rank(1, "b")),
    furthest_step=50,  # it made no progress yet
)
JOB = JobView(SPEC, JobState.RUNNING, NOW - 1000, False, GENERATION, newest_step=50, message="running on a, b")
HOSTS = (host("a", job="job"), host("b", job="job"), host("c"))
SAVED = tuple(ShardCopy("job", 2, 50, number, Tier.MEMORY, "a", 1, "d") for number in (0, 1))


def view(
    *,
    job: JobView = JOB,
    hosts: Sequence[HostView] = HOSTS,
    incidents: Sequence[Incident] = (),
    actions: Sequence[ActionView] = (),
    copies: Sequence[ShardCopy] = (),
) -> View:
    return View((job,), tuple(hosts), tuple(incidents), tuple(actions), tuple(copies), 7, 70)


def say(body: SignalBody, *, source: str = "", at: float = NOW, seq: int = 1) -> Signal:
    """Said by the host that has the rank, unless another is named."""
    return Signal(source or ("b" if getattr(body, "rank", 0) == 1 else "a"), "i1", seq, at, body)


def exited(
    number: int = 1, *, generation: int = 2, exit_code: int | None = 1, signal: int | None = None, error: str = "boom"
) -> WorkerExited:
    problem = WorkerError("ValueError", error) if error else None
    return WorkerExited("job", generation, number, 4242, exit_code, signal, 50, problem)


KILLED = exited(exit_code=None, signal=9, error="")
LOST = exited(error="Connection reset by peer")


def incident(**more: object) -> Incident:
    facts: dict[str, object] = {
        "incident_id": "inc-1",
        "job": "job",
        "host_id": "b",
        "cause": "worker_killed",
        "state": IncidentState.ACTING,
        "opened_at": NOW - 10,
        "since": NOW - 10,
        "message": "Rank 1 was killed.",
        "generation": 1,
        "failed_step": 50,
        "action_id": "act-1",
        "decisions_made": 1,
    }
    return Incident(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def action(**more: object) -> ActionView:
    plan = ActionPlan(
        DecisionKind.RESTART_IN_PLACE,
        "job",
        SPEC,
        generation=1,
        stop_hosts=("a", "b"),
        next=GenerationPlan("job", 2, 1, (), {}, (), restart_count=1),
    )
    facts: dict[str, object] = {
        "action_id": "act-1",
        "decision_id": "dec-1",
        "incident_id": "inc-1",
        "plan": plan,
        "state": ActionState.SUCCEEDED,
        "phase": "start",
        "started_at": NOW - 10,
        "positions": {"0": 50, "1": 51},
        "restore_step": 49,
        "restore_fixed": True,
    }
    return ActionView(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def decided(outcome: Outcome) -> Decision:
    (decision,) = outcome.decisions
    return decision


# --- jobs ------------------------------------------------------------------------------------------------------------


def submitted(**more: object) -> JobView:
    return JobView(SPEC, JobState.SUBMITTED, NOW, False, None, **more)  # type: ignore[arg-type]  # a builder


def test_a_job_starts_when_hosts_suffice() -> None:
    outcome = decide(view(job=submitted(), hosts=(host("a"), host("b"), host("c"))), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.kind, decision.rule, decision.incident_id) == (
        DecisionKind.START_JOB,
        "start_when_hosts_suffice",
        "",
    )
    plan = decision.action
    assert plan is not None and plan.next is not None
    assert [part.ranks for part in plan.next.hosts] == [(0,), (1,)]
    assert plan.next.peers == {"a": ("b",), "b": ("a",)}
    assert plan.next.master_port == 29_500 and plan.warm_hosts == ("c",)
    assert plan.next.run == run_id(NOW)
    assert outcome.jobs[-1].state is JobState.RUNNING


def test_a_job_that_waits_says_so_once() -> None:
    outcome = decide(view(job=submitted(), hosts=(host("a"),)), [], SETTINGS, NOW)
    assert outcome.jobs[0].message == "waits for hosts: it needs 2 hosts, free: a"
    again = decide(view(job=submitted(message=outcome.jobs[0].message), hosts=(host("a"),)), [], SETTINGS, NOW)
    assert again.empty


@pytest.mark.parametrize(
    "unfit",
    [
        host("a", state=HostState.SILENT, since=NOW),
        host("a", state=HostState.CORDONED),
        host("a", job="other"),
        host("a", preempt_deadline_at=NOW + 10),
        host("a", last_report_at=NOW - 60),
        host("a", stale_jobs={"other": 3}),
    ],
)
def test_unfit_hosts_get_no_work(unfit: HostView) -> None:
    assert not decide(view(job=submitted(), hosts=(unfit, host("b"))), [], SETTINGS, NOW).decisions


def test_hosts_that_the_user_named_come_in_that_order() -> None:
    spec = msgspec.structs.replace(SPEC, hosts=("c", "b"))
    job = msgspec.structs.replace(submitted(), spec=spec)
    plan = decided(decide(view(job=job, hosts=(host("a"), host("b"), host("c"))), [], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None
    assert [part.host_id for part in plan.next.hosts] == ["c", "b"]


def test_two_jobs_do_not_get_the_same_hosts() -> None:
    other = msgspec.structs.replace(submitted(), spec=msgspec.structs.replace(SPEC, job="other"))
    both = msgspec.structs.replace(view(hosts=[host(n) for n in "abc"]), jobs=(submitted(), other))
    outcome = decide(both, [], SETTINGS, NOW)
    assert [d.job for d in outcome.decisions] == ["job"]
    assert outcome.jobs[-1].message == "waits for hosts: it needs 2 hosts, free: c"


def test_an_operators_stop_supersedes_everything() -> None:
    job = msgspec.structs.replace(JOB, stop_requested=True)
    running = action(state=ActionState.DISPATCHED)
    outcome = decide(view(job=job, incidents=[incident()], actions=[running]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.STOP_JOB
    assert outcome.superseded_actions == ("act-1",)
    assert outcome.jobs[-1].state is JobState.STOPPED
    assert outcome.incidents[-1].state is IncidentState.RESOLVED
    assert outcome.decisions[0].action is not None and outcome.decisions[0].action.grace_s == SPEC.stop_grace_s


def test_a_job_that_does_not_save_every_step_saves_one_before_it_is_stopped_if_that_outlives_it() -> None:
    def stopped(spec: CheckpointSpec) -> ActionPlan:
        job = msgspec.structs.replace(JOB, spec=msgspec.structs.replace(SPEC, checkpoint=spec), stop_requested=True)
        plan = decided(decide(view(job=job), [], SETTINGS, NOW)).action
        assert plan is not None and plan.kind is DecisionKind.STOP_JOB
        return plan

    seldom = CheckpointSpec(every_steps=100, persistent_dir="/store", persistent_every_s=600.0)
    plan = stopped(seldom)
    assert plan.emergency_step > max(rank.step for rank in JOB.generation.ranks)
    assert plan.deadline_s > stopped(CheckpointSpec(every_steps=100)).deadline_s  # time for the flush
    assert stopped(CheckpointSpec(every_steps=100)).emergency_step == -1
    assert stopped(msgspec.structs.replace(seldom, every_steps=1)).emergency_step == -1


def test_a_job_is_done_when_all_ranks_are() -> None:
    ends = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
    assert decide(view(), ends[:1], SETTINGS, NOW).empty
    outcome = decide(view(), ends, SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.COMPLETE_JOB
    assert outcome.jobs[-1].state is JobState.SUCCEEDED and not outcome.incidents
    assert decided(outcome).reason == "All 2 ranks of generation 2 ended with exit code 0."


def test_a_job_of_one_rank_is_told_of_as_one() -> None:
    alone = msgspec.structs.replace(GENERATION, hosts=GENERATION.hosts[:1], ranks=GENERATION.ranks[:1])
    spec = msgspec.structs.replace(SPEC, nnodes=1)
    job = msgspec.structs.replace(JOB, spec=spec, generation=alone)
    ended = decide(view(job=job), [say(exited(0, exit_code=0, error=""))], SETTINGS, NOW)
    assert decided(ended).reason == "The only rank of generation 2 ended with exit code 0."
    crash = msgspec.structs.replace(exited(0, exit_code=None, signal=6, error=""), last_phase=Phase.DONE)
    crashed = decide(view(job=job), [say(crash)], SETTINGS, NOW)
    assert decided(crashed).reason == "The only rank of generation 2 was done; it crashed on the way out."


def test_a_crash_after_the_end_is_on_record_and_no_failure() -> None:
    crash = msgspec.structs.replace(exited(1, exit_code=None, signal=6, error=""), last_phase=Phase.DONE)
    outcome = decide(view(), [say(exited(0, exit_code=0, error="")), say(crash, seq=2)], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.COMPLETE_JOB and not outcome.incidents
    assert decided(outcome).evidence["crashed_after_done"] == "rank 1 on b: SIGABRT"
    assert "1 crashed on the way out" in decided(outcome).reason


def test_a_job_ends_also_where_an_earlier_placement_left_copies() -> None:
    ends = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
    left_behind = ShardCopy("job", 1, 40, 0, Tier.MEMORY, "c", 10, "00")
    plan = decided(decide(view(copies=[left_behind]), ends, SETTINGS, NOW)).action
    assert plan is not None and set(plan.stop_hosts) == {"a", "b", "c"}


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_killed_worker_restarts_in_place() -> None:
    outcome = decide(view(copies=SAVED), [say(KILLED, source="b")], SETTINGS, NOW)
    decision = decided(outcome)
    assert decision.rule == "restart_in_place" and decision.incident_id == "inc-7" and decision.decision_id == "dec-70"
    assert decision.reason == (
        "Rank 1 on b (pid 4242) was killed by signal 9 (SIGKILL) after step 50. "
        "No host has to be replaced: generation 3 starts in place. This is restart 2 of 3."
    )
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


@pytest.mark.parametrize(
    "body",
    [
        exited(generation=1, exit_code=None, signal=9),
        exited(generation=3, exit_code=None, signal=9),
        msgspec.structs.replace(KILLED, job="unknown"),
        msgspec.structs.replace(KILLED, expected=True),
        WorkerStartFailed("job", 1, 0, "gone"),
        RankStalled("job", 1, (0,), Phase.STEP, 5, 3.0, 2.0),
        HostReturned("a", 3.0),
        HostReturned("nobody", 3.0),
        HostSilent("nobody", 3.0, 2.0, ()),
        PreemptionNotice(0.0, "x"),
        PeerUnreachable("b", "x"),
        SaveFailed("job", 2, 0, 5, "x"),
        EngineRestarted("x"),
    ],
)
def test_these_signals_change_nothing(body: SignalBody) -> None:
    assert decide(view(), [say(body)], SETTINGS, NOW).empty


def test_news_of_a_silent_host_that_reported_since_is_old() -> None:
    assert decide(view(), [say(HostSilent("b", 3.0, 2.0, ()), at=NOW - 5)], SETTINGS, NOW).empty


def test_ranks_that_moved_since_are_not_stalled() -> None:
    stall = RankStalled("job", 2, (0, 1), Phase.STEP, 49, 3.0, 2.0)
    assert decide(view(), [say(stall, at=NOW - 5)], SETTINGS, NOW).empty
    assert decided(decide(view(), [say(stall)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE


def test_a_lost_connection_waits_for_its_cause() -> None:
    outcome = decide(view(), [say(LOST, source="b")], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.HOLD and decided(outcome).action is None
    (held,) = outcome.incidents
    assert held.state is IncidentState.DECIDING and held.hold_until == outcome.wake_at == NOW + 2.0
    waiting = _with_exit(LOST)
    assert not decide(view(job=waiting, incidents=[held]), [], SETTINGS, NOW + 1.0).decisions
    # The cause arrives: at once.
    found = decide(view(job=waiting, incidents=[held]), [say(exited(0, exit_code=None, signal=9))], SETTINGS, NOW + 1.0)
    assert decided(found).kind is DecisionKind.RESTART_IN_PLACE
    assert found.incidents[0].cause == "worker_killed" and found.incidents[0].host_id == "a"
    # It never arrives, and every host has been heard of since.
    heard = [msgspec.structs.replace(h, last_report_at=NOW + 2.0) for h in HOSTS]
    late = decide(view(job=waiting, incidents=[held], hosts=heard), [], SETTINGS, NOW + 2.1)
    assert decided(late).kind is DecisionKind.RESTART_IN_PLACE and late.incidents[0].cause == "connection_lost"


def test_a_host_that_is_not_heard_of_is_waited_for_longer() -> None:
    (held,) = decide(view(), [say(LOST)], SETTINGS, NOW).incidents
    waiting = _with_exit(LOST)
    heard = [host("a", job="job", last_report_at=NOW + 2), HOSTS[1], host("c", last_report_at=NOW + 2)]
    outcome = decide(view(job=waiting, incidents=[held], hosts=heard), [], SETTINGS, NOW + 2.1)
    assert decided(outcome).kind is DecisionKind.HOLD and "a report of b" in decided(outcome).reason
    silent = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
    found = decide(view(job=waiting, incidents=outcome.incidents, hosts=heard), [silent], SETTINGS, NOW + 3)
    assert decided(found).kind is DecisionKind.MIGRATE_TO_SPARE
    assert "c takes rank 1 of b" in decided(found).reason


def _with_exit(body: WorkerExited, at: float = NOW) -> JobView:
    ranks = tuple(
        msgspec.structs.replace(r, exited=body, exited_at=at) if r.rank == body.rank else r for r in GENERATION.ranks
    )
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


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
    assert "a cannot reach it either" in decision.reason


def came_back_empty(*numbers: int) -> JobView:
    ranks = tuple(msgspec.structs.replace(r, is_gone=r.rank in numbers) for r in GENERATION.ranks)
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))


def test_ranks_that_a_newer_daemon_of_their_host_does_not_know_have_failed() -> None:
    decision = decided(decide(view(job=came_back_empty(1), copies=SAVED), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "restart_in_place")
    assert decision.reason == (
        "b came back empty: the daemon that runs there now knows nothing of rank 1. "
        "No host has to be replaced: generation 3 starts in place. This burns no restart."
    )
    both = decided(decide(view(job=came_back_empty(0, 1)), [], SETTINGS, NOW))
    assert both.reason.startswith("a, b came back empty: the daemons that run there now know nothing of ranks 0, 1.")
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


def test_without_a_spare_it_holds_and_looks_again() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    outcome = decide(view(hosts=HOSTS[:2]), [silent], SETTINGS, NOW)
    assert decided(outcome).rule == "wait_for_a_spare" and "No spare" in decided(outcome).reason
    assert outcome.wake_at == NOW + 1.0
    heard = host("a", job="job", last_report_at=NOW + 0.9)
    after = view(hosts=(heard, host("b", state=HostState.SILENT, job="job", since=NOW)), incidents=outcome.incidents)
    assert not decide(after, [], SETTINGS, NOW + 1).decisions
    came = msgspec.structs.replace(after, hosts=(*after.hosts, host("d")))
    assert decided(decide(came, [], SETTINGS, NOW + 1)).kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_host_that_returns_while_a_spare_is_awaited_may_go_on() -> None:
    held = incident(cause="host_silent", state=IncidentState.DECIDING, generation=2, action_id="", failed_step=50)
    back = host("b", state=HostState.SILENT, job="job", since=NOW - 8)
    returned = decide(view(hosts=(HOSTS[0], back), incidents=[held]), [say(HostReturned("b", 9.0))], SETTINGS, NOW)
    assert returned.hosts[0].state is HostState.HEALTHY
    assert decided(returned).rule == "watch_returned_hosts"
    well = (HOSTS[0], host("b", job="job", since=NOW))
    ranks = (rank(0, "a", step=51, at=NOW + 1), rank(1, "b", step=51, at=NOW + 1))
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    (closed,) = decide(view(job=job, hosts=well, incidents=returned.incidents), [], SETTINGS, NOW + 1).incidents
    assert closed.state is IncidentState.RESOLVED and closed.lost_steps == 0
    stuck = decide(view(hosts=well, incidents=returned.incidents), [], SETTINGS, NOW + 2)
    assert decided(stuck).kind is DecisionKind.RESTART_IN_PLACE


def test_a_host_is_not_heard_of_the_ranks_of_others() -> None:
    start_failed = WorkerStartFailed("job", 2, 1, "no memory")
    for source in ("a", "c"):
        for body in (KILLED, exited(exit_code=0, error=""), start_failed):
            outcome = decide(view(), [say(body, source=source)], SETTINGS, NOW)
            assert not outcome.decisions and not outcome.incidents, (source, body)
    assert decide(view(), [say(start_failed)], SETTINGS, NOW).decisions


def test_an_identical_exception_fails_the_job() -> None:
    past = PastFailure(1, "worker_exception", "ValueError", "boom at 0x7f01", 50)
    job = msgspec.structs.replace(JOB, failures=(past,))
    outcome = decide(view(job=job), [say(exited(error="boom at 0xdead"))], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_on_identical_exception"
    assert outcome.jobs[-1].state is JobState.FAILED
    assert outcome.incidents[-1].state is IncidentState.ESCALATED
    other = decide(view(job=job), [say(exited(error="another"))], SETTINGS, NOW)
    assert decided(other).kind is DecisionKind.RESTART_IN_PLACE


def test_a_step_that_cannot_be_restored_is_left_out_by_ranks_that_move_too() -> None:
    body = msgspec.structs.replace(exited(exit_code=23), error=WorkerError("RestoreFailed", "no source"))
    copies = [ShardCopy("job", 1, step, n, Tier.PERSISTENT, "", 10, "d") for step in (39, 40) for n in range(2)]
    leaves = (HOSTS[0], host("b", job="job", state=HostState.CORDONED), HOSTS[2])
    decision = decided(decide(view(hosts=leaves, copies=copies), [say(body)], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (
        DecisionKind.MIGRATE_TO_SPARE,
        "restart_from_an_older_recovery_point",
    )
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


def test_a_job_that_goes_on_gets_the_places_that_it_had() -> None:
    before = msgspec.structs.replace(GENERATION, ranks=())
    job = submitted(before=before)
    free = (host("a"), host("b"), host("c"), host("d"))
    plan = decided(decide(view(job=job, hosts=free), [], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None
    assert [(part.host_id, part.ranks) for part in plan.next.hosts] == [("a", (0,)), ("b", (1,))]
    assert (plan.generation, plan.next.generation, plan.next.parent) == (2, 3, 2)
    assert plan.next.parent_lineage == GENERATION.lineage
    lost = (host("a", job="other"), *free[1:])
    plan = decided(decide(view(job=job, hosts=lost), [], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None
    assert [(part.host_id, part.ranks) for part in plan.next.hosts] == [("c", (0,)), ("b", (1,))]
    moved = (msgspec.structs.replace(free[0], address="10.9.9.9"), *free[1:])
    plan = decided(decide(view(job=job, hosts=moved), [], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None and plan.next.hosts[0].address == "10.9.9.9"


def test_an_exception_of_a_script_without_steps_is_left_to_max_restarts() -> None:
    ranks = tuple(rank(n, on, step=-1, phase=Phase.STARTING) for n, on in enumerate("ab"))
    generation = msgspec.structs.replace(GENERATION, ranks=ranks, restore_step=None)
    past = PastFailure(1, "worker_exception", "ValueError", "boom", -1)
    job = msgspec.structs.replace(JOB, generation=generation, failures=(past,))
    body = msgspec.structs.replace(exited(), last_step=-1)
    assert decided(decide(view(job=job), [say(body)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE


def test_restarts_are_used_up() -> None:
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, restart_count=3))
    outcome = decide(view(job=job), [say(KILLED)], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_when_restarts_are_used_up"
    assert "All 3 restarts" in outcome.jobs[-1].message
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    assert decided(decide(view(job=job), [silent], SETTINGS, NOW)).kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_start_in_which_no_worker_failed_burns_no_restart() -> None:
    started = msgspec.structs.replace(GENERATION, restart_count=3, ranks=())
    job = msgspec.structs.replace(JOB, generation=started)
    late = action(state=ActionState.TIMED_OUT, message="b did not answer in phase start in time.")
    again = decided(decide(view(job=job, incidents=[incident()], actions=[late]), [], SETTINGS, NOW))
    assert again.kind is DecisionKind.RESTART_IN_PLACE and "This burns no restart." in again.reason
    assert again.action is not None and again.action.next is not None and again.action.next.restart_count == 3
    never = decide(view(job=job), [], SETTINGS, NOW)  # the job's first start: there is no incident yet
    assert never.incidents[0].cause == "start_overdue"
    assert decided(never).kind is DecisionKind.RESTART_IN_PLACE
    endless = incident(cause="start_overdue", decisions_made=8)
    bounded = decide(view(job=job, incidents=[endless], actions=[late]), [], SETTINGS, NOW)
    assert decided(bounded).rule == "fail_after_too_many_decisions"


def test_too_many_decisions_escalate() -> None:
    stuck = incident(state=IncidentState.DECIDING, generation=2, decisions_made=8, action_id="")
    outcome = decide(view(job=_with_exit(KILLED), incidents=[stuck]), [], SETTINGS, NOW)
    assert decided(outcome).rule == "fail_after_too_many_decisions"


def test_a_failed_action_is_followed_by_another_with_growing_pauses() -> None:
    failed = action(state=ActionState.FAILED, message="b could not stop: no disk", phase="stop")
    generation = msgspec.structs.replace(GENERATION, started_at=0.0, ranks=(), restore_step=None)
    job = msgspec.structs.replace(JOB, generation=generation)
    first = decide(view(job=job, incidents=[incident()], actions=[failed]), [], SETTINGS, NOW)
    assert decided(first).kind is DecisionKind.RESTART_IN_PLACE
    assert "act-1 ended failed: b could not stop: no disk." in decided(first).reason
    later = decide(view(job=job, incidents=[incident(decisions_made=3)], actions=[failed]), [], SETTINGS, NOW)
    assert decided(later).rule == "back_off_after_a_failed_action" and later.wake_at == NOW + 1.0


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
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    waiting = incident(state=IncidentState.VERIFYING, since=NOW - 299, restored_step=49)
    early = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW)
    assert not early.decisions and early.wake_at == NOW + 1
    unheard = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW + 1)
    assert not unheard.decisions and unheard.wake_at == NOW + 2  # after an outage: its steps may be on their way
    heard = tuple(host(name, job="job", last_report_at=NOW + 1.1) for name in "ab")
    late = decide(view(job=job, hosts=heard, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW + 1.5)
    assert decided(late).kind is DecisionKind.RESTART_IN_PLACE


def test_a_started_rank_of_which_its_host_tells_nothing_is_missed_soon() -> None:
    """Its host may have lost it before it told of it."""
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=(rank(0, "a"),)))
    waiting = incident(state=IncidentState.VERIFYING, since=NOW - 12)
    outcome = decide(view(job=job, incidents=[waiting], actions=[action()]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.RESTART_IN_PLACE
    young = msgspec.structs.replace(waiting, since=NOW - 8)
    assert not decide(view(job=job, incidents=[young], actions=[action()]), [], SETTINGS, NOW).decisions


def test_ranks_that_no_report_could_tell_of_yet_are_not_missing() -> None:
    generation = msgspec.structs.replace(GENERATION, ranks=(), started_at=NOW - 600)
    job = msgspec.structs.replace(JOB, generation=generation)
    away = tuple(host(name, job="job", last_report_at=NOW - 595) for name in "ab")
    back = decide(view(job=job, hosts=away), [], SETTINGS, NOW)
    assert not back.incidents and back.wake_at == NOW + 1
    behind = tuple(host(name, job="job", stored_report_at=NOW - 595) for name in "ab")  # heard of, and not yet stored
    assert not decide(view(job=job, hosts=behind), [], SETTINGS, NOW).incidents
    assert decide(view(job=job), [], SETTINGS, NOW).incidents[0].cause == "start_overdue"


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
    assert "generation 3 goes back to step 39" in decision.reason
    none_older = decided(decide(view(copies=older[2:]), [say(body)], SETTINGS, NOW))
    assert none_older.rule == "restart_in_place"  # once more, before everything is given up
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "restore_failed", "", "", 40),))
    scratch = decided(decide(view(job=job, copies=older[2:]), [say(body)], SETTINGS, NOW))
    assert "the beginning" in scratch.reason


# --- preemption ------------------------------------------------------------------------------------------------------

NOTICE = PreemptionNotice(NOW + 30.0, "cloud")


def test_a_notice_saves_a_named_step_first() -> None:
    outcome = decide(view(), [say(NOTICE, source="b")], SETTINGS, NOW)
    decision = decided(outcome)
    plan = decision.action
    assert plan is not None and plan.kind is DecisionKind.EMERGENCY_CHECKPOINT
    # 10 steps in 99.9 s: the next is about to come; the margin is 3.
    assert plan.emergency_step == 54 and plan.stop_hosts == ("a", "b") and plan.warm_hosts == ("c",)
    assert plan.deadline_s == pytest.approx(25.0)
    assert outcome.incidents[0].cause == "preemption_notice"
    assert outcome.hosts[0].preempt_deadline_at == NOW + 30.0


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_a_notice_counts_by_the_clock_of_its_host(skew_s: float) -> None:
    told = say(PreemptionNotice(NOW + skew_s + 29.5, "cloud"), source="b", at=NOW + skew_s - 0.5)
    outcome = decide(view(), [told], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.EMERGENCY_CHECKPOINT
    assert outcome.hosts[0].preempt_deadline_at == pytest.approx(NOW + 30.0)
    again = say(PreemptionNotice(NOW + skew_s + 29.5, "cloud"), source="b", at=NOW + skew_s + 0.5, seq=2)
    hosts = (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 30.0), HOSTS[2])
    assert not decide(view(hosts=hosts), [again], SETTINGS, NOW + 1.0).hosts


def preempted() -> tuple[HostView, ...]:
    return (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + 20), HOSTS[2])


def saved(state: ActionState) -> ActionView:
    plan = ActionPlan(DecisionKind.EMERGENCY_CHECKPOINT, "job", SPEC, 2, stop_hosts=("a", "b"), emergency_step=54)
    return action(plan=plan, state=state, phase="save")


@pytest.mark.parametrize("state", [ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT])
def test_after_the_save_or_without_it_the_ranks_move(state: ActionState) -> None:
    notice = incident(cause="preemption_notice", generation=2)
    outcome = decide(view(hosts=preempted(), incidents=[notice], actions=[saved(state)]), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None and plan.kind is DecisionKind.MIGRATE_TO_SPARE and plan.next is not None
    assert [part.host_id for part in plan.next.hosts] == ["a", "c"]
    assert plan.stop_hosts == ("a", "b") and plan.next.restart_count == 1


def test_without_a_spare_training_goes_on_until_the_last_moment() -> None:
    outcome = decide(view(hosts=preempted()[:2]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.HOLD
    held = outcome.incidents
    late = decide(view(hosts=preempted()[:2], incidents=held), [], SETTINGS, NOW + 10.5)
    assert decided(late).kind is DecisionKind.EMERGENCY_CHECKPOINT
    assert "then they wait for a spare" in decided(late).reason


@pytest.mark.parametrize(
    ("left_s", "spares", "kind"),
    [
        (10.1, 0, DecisionKind.HOLD),
        (10.0, 0, DecisionKind.EMERGENCY_CHECKPOINT),  # twice the reserve
        (5.1, 0, DecisionKind.EMERGENCY_CHECKPOINT),
        (5.0, 0, DecisionKind.HOLD),  # too late
        (30.0, 1, DecisionKind.EMERGENCY_CHECKPOINT),
        (5.0, 1, DecisionKind.MIGRATE_TO_SPARE),
    ],
)
def test_how_much_of_a_notice_is_left_decides(left_s: float, spares: int, kind: DecisionKind) -> None:
    hosts = (HOSTS[0], host("b", job="job", preempt_deadline_at=NOW + left_s), *HOSTS[2 : 2 + spares])
    outcome = decide(view(hosts=hosts), [], SETTINGS, NOW)
    decision = decided(outcome)
    assert decision.kind is kind
    if kind is DecisionKind.EMERGENCY_CHECKPOINT:
        assert decision.action is not None
        assert decision.action.deadline_s == pytest.approx(left_s - 5.0)
        assert ("c takes over" in decision.reason) is bool(spares)
    if kind is DecisionKind.HOLD:
        assert outcome.wake_at == pytest.approx(NOW + min(1.0, left_s - 10.0) if left_s > 10.0 else NOW + 1.0)
    (found,) = outcome.incidents
    assert found.observed_at == NOW, "the notice was taken in earlier, at an unknown time"


@pytest.mark.parametrize("state", [IncidentState.ACTING, IncidentState.VERIFYING])
def test_only_failures_and_departures_that_are_handled_come_before_a_notice(state: IncidentState) -> None:
    stale = incident(cause="superseded_workers", host_id="c", state=state, since=NOW - 1, incident_id="inc-3")
    busy = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    cleaning = ActionPlan(DecisionKind.CORDON, "job", SPEC, generation=1, stop_hosts=("c",))
    seen = {
        "hosts": (*preempted()[:2], busy, host("d")),
        "actions": [action(plan=cleaning, state=ActionState.DISPATCHED)],
    }
    outcome = decide(view(incidents=[stale, NOTICED], **seen), [], SETTINGS, NOW)  # type: ignore[arg-type]  # as named
    assert DecisionKind.EMERGENCY_CHECKPOINT in {decision.kind for decision in outcome.decisions}
    other = incident(
        cause="drain_requested", host_id="a", state=state, generation=2, incident_id="inc-3", since=NOW - 1
    )
    drained = host("a", job="job", drain=DrainView(DrainState.REQUESTED, NOW - 9, NOW + 300))
    saves = msgspec.structs.replace(saved(ActionState.DISPATCHED), incident_id="inc-3")
    seen = {"hosts": (drained, *preempted()[1:], host("d")), "actions": [saves]}
    outcome = decide(view(incidents=[other, NOTICED], **seen), [], SETTINGS, NOW)  # type: ignore[arg-type]  # as named
    held = [decision.rule for decision in outcome.decisions if decision.incident_id == NOTICED.incident_id]
    assert held == ["let_the_other_incident_go_first"]


@pytest.mark.parametrize(
    ("ran_s", "report_ago_s", "step"),
    [
        (40.0, 0.0, 90 + 1 + 3),  # 50 steps in 40 s; a quarter of a second is a third of a step
        (5.0, 0.0, 93 + 3),  # ten a second
        (5.0, 0.44, 97 + 3),
        (5.0, -2.0, 93 + 3),  # of a clock that is ahead
        (100.0, 3.02, 93 + 3),  # 0.91 steps a second, from step 0 on
    ],
)
def test_the_named_step_is_ahead_of_ranks_that_train_on(ran_s: float, report_ago_s: float, step: int) -> None:
    at = NOW - report_ago_s
    ranks = (rank(0, "a", step=90, at=at), rank(1, "b", step=88, at=at))
    restored = None if ran_s == 100.0 else 40
    generation = msgspec.structs.replace(GENERATION, ranks=ranks, started_at=at - ran_s, restore_step=restored)
    job = msgspec.structs.replace(JOB, generation=generation)
    plan = decided(decide(view(job=job, hosts=preempted()), [], SETTINGS, NOW)).action
    assert plan is not None and plan.emergency_step == step


def test_the_time_of_a_notice_is_that_of_its_signal() -> None:
    told = say(PreemptionNotice(NOW + 28.0, "cloud"), source="b", at=NOW - 2.0)
    assert decide(view(), [told], SETTINGS, NOW).incidents[0].observed_at == NOW - 2.0


def test_a_failure_comes_before_a_notice_and_moves_the_ranks_too() -> None:
    notice = incident(cause="preemption_notice", generation=2)
    running = saved(ActionState.DISPATCHED)
    outcome = decide(view(hosts=preempted(), incidents=[notice], actions=[running]), [say(KILLED)], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE and decided(outcome).incident_id == "inc-7"
    assert outcome.superseded_actions == ("act-1",)


def test_a_preempted_host_without_ranks_is_cordoned() -> None:
    outcome = decide(view(hosts=(*HOSTS[:2], host("c", preempt_deadline_at=NOW + 20))), [], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.CORDONED and not outcome.decisions


# --- hosts -----------------------------------------------------------------------------------------------------------


def test_a_returned_host_is_a_spare() -> None:
    gone = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70)
    outcome = decide(view(hosts=(*HOSTS[:2], gone)), [say(HostReturned("c", 70.0), source="sensor.1")], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.SPARE
    unsaid = msgspec.structs.replace(gone, last_report_at=NOW)
    assert decide(view(hosts=(*HOSTS[:2], unsaid)), [], SETTINGS, NOW).hosts[0].state is HostState.SPARE


@pytest.mark.parametrize(("deadline_at", "after"), [(NOW - 5, 0.0), (NOW, 0.0), (NOW + 5, None), (0.0, None)])
def test_a_notice_is_over_if_its_host_returns_after_it(deadline_at: float, after: float | None) -> None:
    gone = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70, preempt_deadline_at=deadline_at)
    outcome = decide(view(hosts=(*HOSTS[:2], gone)), [say(HostReturned("c", 70.0), source="sensor.1")], SETTINGS, NOW)
    assert outcome.hosts[0].preempt_deadline_at == after


def test_superseded_workers_are_stopped_before_a_host_is_a_spare() -> None:
    back = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW, stale_jobs={"job": 1})
    outcome = decide(view(hosts=(*HOSTS[:2], back)), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None
    assert (plan.kind, plan.stop_hosts, plan.generation, plan.next) == (DecisionKind.CORDON, ("c",), 1, None)
    assert outcome.hosts[0].state is HostState.IN_REPAIR
    clean = host("c", state=HostState.IN_REPAIR)
    done = action(plan=plan, state=ActionState.SUCCEEDED, action_id="act-70")
    after = decide(view(hosts=(*HOSTS[:2], clean), incidents=outcome.incidents, actions=[done]), [], SETTINGS, NOW)
    assert after.hosts[0].state is HostState.SPARE
    assert after.incidents[0].state is IncidentState.RESOLVED


@pytest.mark.parametrize(
    ("state", "found", "after_s", "ends"),
    [
        (IncidentState.ACTING, None, 10.0, IncidentState.ACTING),  # and decided again, at once
        (IncidentState.ACTING, ActionState.DISPATCHED, 10.0, None),
        (IncidentState.ACTING, ActionState.SUCCEEDED, 10.0, IncidentState.VERIFYING),
        (IncidentState.ACTING, ActionState.FAILED, 10.0, IncidentState.ACTING),
        (IncidentState.VERIFYING, ActionState.SUCCEEDED, 10.0, None),
        (IncidentState.VERIFYING, ActionState.SUCCEEDED, 31.0, IncidentState.ACTING),
    ],
)
def test_superseded_workers_are_followed_until_they_are_gone(
    state: IncidentState, found: ActionState | None, after_s: float, ends: IncidentState | None
) -> None:
    stale = incident(cause="superseded_workers", host_id="c", state=state, since=NOW - after_s)
    held = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    plan = ActionPlan(DecisionKind.CORDON, "job", SPEC, generation=1, stop_hosts=("c",))
    actions = [action(plan=plan, state=found)] if found is not None else []
    outcome = decide(view(hosts=(*HOSTS[:2], held), incidents=[stale], actions=actions), [], SETTINGS, NOW)
    assert [changed.state for changed in outcome.incidents] == ([] if ends is None else [ends])


def test_workers_that_are_superseded_in_an_old_report_only_may_be_gone() -> None:
    since = NOW - 1.0
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, started_at=since))
    left = host("c", last_report_at=NOW + 4, stored_report_at=since + 1, stale_jobs={"job": 1})
    assert not decide(view(job=job, hosts=(*HOSTS[:2], left)), [], SETTINGS, NOW + 4).incidents
    stored = msgspec.structs.replace(left, stored_report_at=NOW + 4)
    (found,) = decide(view(job=job, hosts=(*HOSTS[:2], stored)), [], SETTINGS, NOW + 4).incidents
    assert found.cause == "superseded_workers"


def test_workers_of_a_job_that_ended_are_stopped_and_its_slots_freed() -> None:
    over = msgspec.structs.replace(JOB, state=JobState.FAILED, ended_at=NOW - 60)
    back = host("a", state=HostState.SILENT, since=NOW - 90, last_report_at=NOW, stale_jobs={"job": 2})
    outcome = decide(view(job=over, hosts=(back,)), [], SETTINGS, NOW)
    plan = decided(outcome).action
    assert plan is not None
    assert (plan.kind, plan.stop_hosts, plan.generation) == (DecisionKind.STOP_JOB, ("a",), 2)
    assert "of job job, which has failed" in outcome.incidents[0].message
    assert not outcome.jobs  # it stays as it ended
    clean = host("a", state=HostState.IN_REPAIR)
    done = action(plan=plan, state=ActionState.SUCCEEDED, action_id="act-70")
    after = decide(view(job=over, hosts=(clean,), incidents=outcome.incidents, actions=[done]), [], SETTINGS, NOW + 1)
    assert after.hosts[0].state is HostState.SPARE
    assert after.incidents[0].state is IncidentState.RESOLVED


def test_the_hosts_of_a_job_that_has_just_ended_are_left_to_its_own_action() -> None:
    over = msgspec.structs.replace(JOB, state=JobState.FAILED, ended_at=NOW - 5)
    hosts = (host("a", stale_jobs={"job": 2}), host("b", stale_jobs={"job": 2}))
    assert decide(view(job=over, hosts=hosts), [], SETTINGS, NOW).empty


def test_each_host_with_superseded_workers_is_found_whoever_else_cannot_be_asked() -> None:
    lost = host("c", state=HostState.SILENT, since=NOW - 60, last_report_at=NOW - 70, stale_jobs={"job": 1})
    early = host("d", stale_jobs={"job": 1}, last_report_at=JOB.generation.started_at + 2.0)  # type: ignore[union-attr]  # it runs
    stale = (host(name, stale_jobs={"job": 1}) for name in "ef")
    outcome = decide(view(hosts=(*HOSTS[:2], lost, early, *stale)), [], SETTINGS, NOW)
    assert [found.host_id for found in outcome.incidents] == ["e", "f"]
    assert {(found.generation, found.observed_at) for found in outcome.incidents} == {(1, NOW)}


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


def test_ranks_are_not_missed_while_an_action_of_their_job_runs() -> None:
    running = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    assert not decide(view(job=UNSTARTED, actions=[running]), [], SETTINGS, NOW).incidents
    assert decide(view(job=UNSTARTED), [], SETTINGS, NOW).incidents[0].cause == "start_overdue"
    other = msgspec.structs.replace(running, plan=msgspec.structs.replace(running.plan, job="other"))
    assert decide(view(job=UNSTARTED, actions=[other]), [], SETTINGS, NOW).incidents


def test_hosts_that_an_action_of_another_job_has_are_not_free() -> None:
    moving = action(state=ActionState.DISPATCHED, incident_id="inc-9")
    granted = GenerationPlan("other", 2, 1, (HostRanks("b", "ip", "b:7", (0,)),), {}, (), restart_count=0)
    plan = msgspec.structs.replace(moving.plan, job="other", stop_hosts=("a",), next=granted)
    hosts = [host(name) for name in "abcd"]

    def placed(plan: ActionPlan, state: ActionState) -> list[str]:
        busy = msgspec.structs.replace(moving, plan=plan, state=state)
        outcome = decide(view(job=submitted(), hosts=hosts, actions=[busy]), [], SETTINGS, NOW)
        found = decided(outcome).action
        assert found is not None and found.next is not None
        return [part.host_id for part in found.next.hosts]

    assert placed(plan, ActionState.DISPATCHED) == ["c", "d"]
    assert placed(msgspec.structs.replace(plan, next=None), ActionState.DISPATCHED) == ["b", "c"]
    assert placed(plan, ActionState.SUCCEEDED) == ["a", "b"]


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


def test_after_a_migration_the_job_says_where_it_runs_now() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    outcome = decide(view(), [silent], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE
    assert outcome.jobs[-1].message == "running on a, c"
    assert outcome.jobs[-1].state is JobState.RUNNING


def test_a_host_that_another_sensor_hears_is_not_silent() -> None:
    silent = say(HostSilent("b", 30.0, 30.0, ()), source="sensor.2")
    assert decide(view(), [silent], SETTINGS, NOW).empty  # its last report, 0.1 s ago, went elsewhere


def test_superseded_workers_that_cannot_be_stopped_cordon_the_host() -> None:
    stuck = incident(
        cause="superseded_workers",
        host_id="c",
        generation=1,
        state=IncidentState.DECIDING,
        decisions_made=8,
        action_id="",
    )
    bad = host("c", state=HostState.IN_REPAIR, stale_jobs={"job": 1})
    outcome = decide(view(hosts=(*HOSTS[:2], bad), incidents=[stuck]), [], SETTINGS, NOW)
    assert outcome.hosts[0].state is HostState.CORDONED
    assert outcome.incidents[0].state is IncidentState.ESCALATED
    assert not outcome.jobs  # the job goes on


# --- evidence --------------------------------------------------------------------------------------------------------

BUDGET = {"generation": 2, "restarts": 1, "restarts_used": 1, "max_restarts": 3}
SILENT_B = say(HostSilent("b", 3.0, 2.0, ("a",)), source="sensor.1", at=NOW + 3)
KILL = {"rank": 1, "host": "b", "pid": 4242, "step": 50, "exit_code": None, "signal": 9, "error": None}
RAISED = KILL | {"exit_code": 1, "signal": None, "error": "ValueError: boom"}
STOPPED = msgspec.structs.replace(JOB, stop_requested=True)
ENDS = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
UNSTARTED = msgspec.structs.replace(
    JOB, generation=msgspec.structs.replace(GENERATION, started_at=0.0, ranks=(), restore_step=None)
)
SEEN_BEFORE = msgspec.structs.replace(JOB, failures=(PastFailure(1, "worker_exception", "ValueError", "boom", 50),))
FAILED_TWICE = action(state=ActionState.FAILED, message="no disk", phase="stop")
NOTICED = incident(
    cause="preemption_notice", generation=2, state=IncidentState.DECIDING, action_id="", decisions_made=0
)
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
                job=_with_exit(KILLED),
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
    assert outcome.wake_at == NOW + 1.0


# --- the queue -------------------------------------------------------------------------------------------------------


def waiting(name: str, nnodes: int, *, hosts: tuple[str, ...] = ()) -> JobView:
    return msgspec.structs.replace(
        submitted(), spec=msgspec.structs.replace(SPEC, job=name, nnodes=nnodes, hosts=hosts)
    )


def started(*jobs: JobView, hosts: Sequence[HostView]) -> tuple[list[str], dict[str, str]]:
    outcome = decide(msgspec.structs.replace(view(hosts=hosts), jobs=jobs), [], SETTINGS, NOW)
    said = {change.job: change.message for change in outcome.jobs}
    return [decision.job for decision in outcome.decisions], said


def test_a_job_of_many_hosts_is_not_starved_by_later_jobs_of_one() -> None:
    hosts = (host("a"), host("b", job="other"), host("c", state=HostState.CORDONED))
    names, said = started(waiting("large", 2), waiting("small", 1), hosts=hosts)
    assert names == []
    assert said["large"] == "waits for hosts: it needs 2 hosts, free: a"
    assert said["small"] == "waits for hosts: it needs 1 host, free: none (job large came first and waits for a)"


def test_what_does_not_delay_the_first_job_goes_before_it() -> None:
    hosts = (host("a"), host("b"), host("c", job="other"))
    assert started(waiting("large", 2, hosts=("a", "c")), waiting("small", 1), hosts=hosts)[0] == ["small"]
    assert started(waiting("huge", 4), waiting("small", 1), hosts=hosts)[0] == ["small"], "it may wait for ever"
    ghost = msgspec.structs.replace(host("z"), last_report_at=NOW - 900)
    assert started(waiting("large", 3), waiting("small", 1), hosts=(*hosts[:2], ghost))[0] == ["small"], "it is off"
    stopped = msgspec.structs.replace(waiting("large", 3), stop_requested=True)
    assert "small" in started(stopped, waiting("small", 1), hosts=hosts)[0]


def with_spares(job: JobView, spares: int) -> JobView:
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, spares=spares))


@pytest.mark.parametrize("runs", [True, False])
def test_a_new_job_leaves_the_spares_that_a_running_job_asked_for(runs: bool) -> None:
    """Also of one that is started in the same round."""
    hosts = (host("a", job="job" if runs else ""), host("b", job="job" if runs else ""), host("c"))
    first = with_spares(JOB if runs else waiting("job", 2), 1)
    names, said = started(first, waiting("small", 1), hosts=hosts)
    assert names == ([] if runs else ["job"])
    assert said["small"] == "waits for hosts: it needs 1 host, free: none (c: spare of job)"
    assert "small" in started(first, waiting("small", 1), hosts=(*hosts, host("d")))[0], "there is one more"
    assert "small" in started(with_spares(first, 0), waiting("small", 1), hosts=hosts)[0], "it asked for none"


def test_a_running_job_that_loses_a_host_gets_its_spare() -> None:
    lost = (HOSTS[0], host("b", job="job", state=HostState.SILENT, since=NOW - 1, last_report_at=NOW - 9), HOSTS[2])
    assert started(waiting("small", 1), with_spares(JOB, 1), hosts=lost)[0] == ["job"]
