"""Rules for a job as a whole: when it starts, which hosts it gets, when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    NOW,
    SETTINGS,
    SPEC,
    action,
    decided,
    exited,
    host,
    incident,
    say,
    submitted,
    view,
)

from flyball.contracts.checkpoints import CheckpointSpec, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobState, Phase
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, GenerationPlan, IncidentState
from flyball.contracts.identity import run_id
from services.controller.round.view import HostView, JobView


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


def test_an_operators_stop_supersedes_everything() -> None:
    job = msgspec.structs.replace(JOB, stop_requested=True)
    running = action(state=ActionState.DISPATCHED)
    outcome = decide(view(job=job, incidents=[incident()], actions=[running]), [], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.STOP_JOB
    assert outcome.superseded_actions == ("act-1",)
    assert outcome.jobs[-1].state is JobState.STOPPING
    assert outcome.incidents[-1].state is IncidentState.RESOLVED
    assert outcome.decisions[0].action is not None and outcome.decisions[0].action.grace_s == SPEC.stop_grace_s


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        (JobState.STOPPING, JobState.STOPPED),
        (JobState.FAILING, JobState.FAILED),
        (JobState.COMPLETING, JobState.SUCCEEDED),
    ],
)
def test_a_job_has_ended_when_its_workers_are_gone(state: JobState, ended: JobState) -> None:
    """Whatever its ranks do until then, and however the action ends that sees to it."""
    job = msgspec.structs.replace(JOB, state=state, message="why", stop_requested=True)
    going_on = action(state=ActionState.DISPATCHED)
    assert decide(view(job=job, actions=[going_on]), [say(exited())], SETTINGS, NOW).jobs == ()
    over = action(state=ActionState.TIMED_OUT)
    outcome = decide(view(job=job, actions=[over]), [say(exited())], SETTINGS, NOW)
    assert [(change.state, change.message) for change in outcome.jobs] == [(ended, "why")]
    assert not outcome.decisions and not outcome.incidents


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
    assert outcome.jobs[-1].state is JobState.COMPLETING and not outcome.incidents


def test_a_job_of_one_rank_is_told_of_as_one() -> None:
    alone = msgspec.structs.replace(GENERATION, hosts=GENERATION.hosts[:1], ranks=GENERATION.ranks[:1])
    spec = msgspec.structs.replace(SPEC, nnodes=1)
    job = msgspec.structs.replace(JOB, spec=spec, generation=alone)
    ended = decide(view(job=job), [say(exited(0, exit_code=0, error=""))], SETTINGS, NOW)
    crash = msgspec.structs.replace(exited(0, exit_code=None, signal=6, error=""), last_phase=Phase.DONE)
    crashed = decide(view(job=job), [say(crash)], SETTINGS, NOW)
    assert decided(ended).kind is decided(crashed).kind is DecisionKind.COMPLETE_JOB


def test_a_crash_after_the_end_is_on_record_and_no_failure() -> None:
    crash = msgspec.structs.replace(exited(1, exit_code=None, signal=6, error=""), last_phase=Phase.DONE)
    outcome = decide(view(), [say(exited(0, exit_code=0, error="")), say(crash, seq=2)], SETTINGS, NOW)
    assert decided(outcome).kind is DecisionKind.COMPLETE_JOB and not outcome.incidents
    assert decided(outcome).evidence["crashed_after_done"] == "rank 1 on b: SIGABRT"


def test_a_job_ends_also_where_an_earlier_placement_left_copies() -> None:
    ends = [say(exited(n, exit_code=0, error=""), seq=n + 1) for n in range(2)]
    left_behind = ShardCopy("job", 1, 40, 0, Tier.MEMORY, "c", 10, "00")
    plan = decided(decide(view(copies=[left_behind]), ends, SETTINGS, NOW)).action
    assert plan is not None and set(plan.stop_hosts) == {"a", "b", "c"}


def test_a_job_that_goes_on_gets_the_places_that_it_had() -> None:
    before = msgspec.structs.replace(GENERATION, ranks=())
    job = submitted(before=before)
    free = (host("a"), host("b"), host("c"), host("d"))

    def placed(*hosts: HostView) -> ActionPlan:
        plan = decided(decide(view(job=job, hosts=hosts), [], SETTINGS, NOW)).action
        assert plan is not None and plan.next is not None
        return plan

    plan = placed(*free)
    assert [(part.host_id, part.ranks) for part in plan.next.hosts] == [("a", (0,)), ("b", (1,))]
    assert (plan.generation, plan.next.generation, plan.next.parent) == (2, 3, 2)
    assert plan.next.parent_lineage == GENERATION.lineage
    without_a = placed(host("a", job="other"), *free[1:]).next.hosts
    assert [(part.host_id, part.ranks) for part in without_a] == [("c", (0,)), ("b", (1,))]
    moved = placed(msgspec.structs.replace(free[0], address="10.9.9.9"), *free[1:])
    assert moved.next.hosts[0].address == "10.9.9.9"


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
