"""A job that may go on with fewer hosts: when it does, with which, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import GENERATION, JOB, NOW, SETTINGS, action, decided, host, incident, rank, submitted, view

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier, world_size_of
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState
from flyball.contracts.decisions import ActionPlan, DecisionKind, IncidentState
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from services.controller.round.view import (
    DrainView,
    GenerationView,
    HostView,
    JobView,
    PastFailure,
    PolicySettings,
    StandingCondition,
    View,
)

GROW, HOLD, SHRINK = DecisionKind.GROW, DecisionKind.HOLD, DecisionKind.SHRINK
SAVE = DecisionKind.EMERGENCY_CHECKPOINT
NAMES = "abcd"
SPEC = JobSpec(
    job="job",
    argv=("t.py",),
    workdir="/",
    nnodes=4,
    nproc_per_node=2,
    min_nodes=2,
    checkpoint=CheckpointSpec(every_steps=1),
)
COPIES = tuple(ShardCopy("job", 2, 50, number, Tier.MEMORY, "a", 1, "d") for number in range(8))


def on(names: str, **more: Any) -> GenerationView:  # noqa: ANN401 - fields of GenerationView
    parts = tuple(HostRanks(name, "ip", f"{name}:7", (2 * n, 2 * n + 1)) for n, name in enumerate(names))
    ranks = tuple(rank(number, part.host_id) for part in parts for number in part.ranks)
    facts = {"lineage": (LineageEntry(1, 40), LineageEntry(2)), "hosts": parts, "ranks": ranks, "peers": {}}
    return msgspec.structs.replace(GENERATION, **{**facts, **more})


def running(names: str = NAMES, *, spec: JobSpec = SPEC, **more: Any) -> JobView:  # noqa: ANN401 - of GenerationView
    return msgspec.structs.replace(JOB, spec=spec.on(len(names)), generation=on(names, **more))


def lost(name: str, *, for_s: float = 30.0) -> HostView:
    return host(name, job="job", state=HostState.SILENT, since=NOW - for_s, last_report_at=NOW - for_s - 5)


def cluster(*others: HostView, names: str = NAMES) -> list[HostView]:
    """The hosts of the job, some of them as given, and further ones."""
    known = {name: host(name, job="job") for name in names} | {other.host_id: other for other in others}
    return list(known.values())


def silent(name: str = "b", *, for_s: float = 25.0) -> Any:  # noqa: ANN401 - an incident
    facts = {"state": IncidentState.DECIDING, "generation": 2, "action_id": "", "decisions_made": 0}
    return incident(cause="host_silent", host_id=name, opened_at=NOW - for_s, since=NOW - for_s, **facts)


def lost_view(*gone: str, job: JobView | None = None, free: Sequence[str] = (), for_s: float = 25.0) -> View:
    hosts = cluster(*(lost(name) for name in gone), *(host(name) for name in free))
    return view(job=job or running(), hosts=hosts, incidents=[silent(gone[0], for_s=for_s)], copies=COPIES)


def placed(plan: ActionPlan | None) -> list[tuple[str, tuple[int, ...]]]:
    assert plan is not None and plan.next is not None
    return [(part.host_id, part.ranks) for part in plan.next.hosts]


def test_a_lost_host_without_a_spare_makes_the_world_smaller() -> None:
    decision = decided(decide(lost_view("b"), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (SHRINK, "go_on_with_fewer_hosts")
    plan = decision.action
    assert placed(plan) == [("a", (0, 1)), ("c", (2, 3)), ("d", (4, 5))], "as many on each host, without gaps"
    assert plan is not None and plan.next is not None
    assert (plan.spec.nnodes, plan.spec.world_size, plan.spec.asked_nnodes) == (3, 6, 4)
    assert plan.unreachable_hosts == ("b",) and plan.next.known_step == 50
    assert all(world_size_of(n, plan.next.parent_lineage, of_job=0) == 8 for n in (1, 2)), "who saved them"
    assert set(plan.next.peers) == {"a", "c", "d"}
    # Eight ranks that wait for 600 s; two that are missing as long, and another restart of eight for 20 s.
    assert (decision.evidence["hold_gpu_s"], decision.evidence["shrink_gpu_s"]) == (4800.0, 1360.0)


@pytest.mark.parametrize(
    ("gone", "free", "spec", "for_s", "kind"),
    [
        ("b", "", SPEC, 5.0, HOLD),  # a spare may come
        ("bc", "", SPEC, 25.0, SHRINK),
        ("bcd", "", SPEC, 25.0, HOLD),  # the user allows no fewer than two
        ("b", "", msgspec.structs.replace(SPEC, min_nodes=0), 25.0, HOLD),
        ("b", "x", SPEC, 25.0, DecisionKind.MIGRATE_TO_SPARE),
        ("b", "x", SPEC, 5.0, DecisionKind.MIGRATE_TO_SPARE),
        ("bc", "x", SPEC, 25.0, SHRINK),  # the spare replaces one of the two
        ("bcd", "x", SPEC, 25.0, SHRINK),  # with the spare, two are left
    ],
)
def test_when_the_world_becomes_smaller(gone: str, free: str, spec: JobSpec, for_s: float, kind: DecisionKind) -> None:
    seen = lost_view(*gone, job=running(spec=spec), free=free, for_s=for_s)
    decision = decided(decide(seen, [], SETTINGS, NOW))
    assert decision.kind is kind, decision.reason
    if kind is SHRINK:
        assert [name for name, _ in placed(decision.action)] == [n for n in NAMES if n not in gone] + list(free)
    course = next((c for c in decision.alternatives if c.kind is SHRINK), None)
    assert course is not None
    assert course.is_feasible is (spec.min_nodes > 0 and not (len(gone) > 2 and not free) and len(gone) > len(free))


def test_the_wait_is_a_setting_of_the_job_and_is_announced() -> None:
    decision = decided(decide(lost_view("b", for_s=5.0), [], SETTINGS, NOW))
    assert decision.rule == "wait_for_a_spare"
    assert decision.reason.endswith("waiting for a host. In 15.0 s it goes on with 3 of 4.")
    hasty = running(spec=msgspec.structs.replace(SPEC, policy={"shrink_after_s": 4.0}))
    assert decided(decide(lost_view("b", job=hasty, for_s=5.0), [], SETTINGS, NOW)).kind is SHRINK


def test_guards_hold_it_back() -> None:
    dry = PolicySettings(dry_run=True)
    assert decided(decide(lost_view("b"), [], dry, NOW)).rule == "only_say_it_in_a_dry_run"
    approve = PolicySettings(approve=(SHRINK,))
    assert decided(decide(lost_view("b"), [], approve, NOW)).evidence["wanted"] == "shrink"
    careful = running(spec=msgspec.structs.replace(SPEC, never_from_scratch=True))
    nothing = msgspec.structs.replace(lost_view("b", job=careful), copies=())
    assert decided(decide(nothing, [], SETTINGS, NOW)).rule == "never_from_scratch"


def test_hosts_that_are_about_to_go_are_left_too_while_enough_remain() -> None:
    hosts = cluster(lost("b"), host("c", job="job", preempt_deadline_at=NOW + 60))
    seen = view(job=running(), hosts=hosts, incidents=[silent()], copies=COPIES)
    (decision,) = (d for d in decide(seen, [], SETTINGS, NOW).decisions if d.kind is SHRINK)
    assert [name for name, _ in placed(decision.action)] == ["a", "d"]
    three = running(spec=msgspec.structs.replace(SPEC, min_nodes=3))
    kept = msgspec.structs.replace(seen, jobs=(three,))
    (decision,) = (d for d in decide(kept, [], SETTINGS, NOW).decisions if d.kind is SHRINK)
    assert [name for name, _ in placed(decision.action)] == ["a", "c", "d"]


# --- hosts that must be left ------------------------------------------------------------------------------------------


def departure(cause: str, *, for_s: float = 30.0, **more: object) -> Any:  # noqa: ANN401 - an incident
    facts = {"state": IncidentState.DECIDING, "generation": 2, "action_id": "", "decisions_made": 0}
    return incident(cause=cause, opened_at=NOW - for_s, **{"since": NOW - for_s, **facts, **more})


def saved(**more: object) -> Any:  # noqa: ANN401 - an action
    plan = ActionPlan(SAVE, "job", SPEC, 2, stop_hosts=tuple(NAMES), emergency_step=54)
    return action(plan=plan, phase="flush", restore_step=None, **more)


@pytest.mark.parametrize(("left_s", "kind"), [(60.0, HOLD), (8.0, SAVE)])
def test_a_host_with_a_notice_is_used_as_long_as_it_is_there(left_s: float, kind: DecisionKind) -> None:
    hosts = cluster(host("b", job="job", preempt_deadline_at=NOW + left_s))
    seen = view(job=running(), hosts=hosts, incidents=[departure("preemption_notice")], copies=COPIES)
    assert decided(decide(seen, [], SETTINGS, NOW)).kind is kind


def test_after_the_last_call_of_a_notice_the_job_goes_on_without_the_host() -> None:
    hosts = cluster(host("b", job="job", preempt_deadline_at=NOW + 6))
    parked = departure("preemption_notice", action_id="act-1")
    seen = view(job=running(), hosts=hosts, incidents=[parked], actions=[saved()], copies=COPIES)
    decision = decided(decide(seen, [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (SHRINK, "leave_without_a_spare")
    assert [name for name, _ in placed(decision.action)] == ["a", "c", "d"]
    assert decision.action is not None and "b" in decision.action.stop_hosts


def drained() -> HostView:
    return host("b", job="job", drain=DrainView(DrainState.REQUESTED, NOW - 30, NOW + 270, "fans"))


@pytest.mark.parametrize(("for_s", "kind"), [(5.0, HOLD), (30.0, SAVE)])
def test_a_drain_without_a_spare_shrinks_the_job_when_the_wait_is_over(for_s: float, kind: DecisionKind) -> None:
    seen = view(job=running(), hosts=cluster(drained()), incidents=[departure("drain_requested", for_s=for_s)])
    decision = decided(decide(seen, [], SETTINGS, NOW))
    assert decision.kind is kind
    assert kind is HOLD or decision.reason.endswith("then they go on without it.")


@pytest.mark.parametrize("since_s", [0.1, 10.0])
def test_ranks_that_saved_for_a_drain_are_not_released_but_moved(since_s: float) -> None:
    parked = departure("drain_requested", action_id="act-1", since=NOW - since_s)
    seen = view(job=running(), hosts=cluster(drained()), incidents=[parked], actions=[saved()], copies=COPIES)
    assert decided(decide(seen, [], SETTINGS, NOW)).rule == "leave_without_a_spare"
    fixed = msgspec.structs.replace(seen, jobs=(running(spec=msgspec.structs.replace(SPEC, min_nodes=0)),))
    assert decided(decide(fixed, [], SETTINGS, NOW)).kind in (HOLD, DecisionKind.RESUME)


@pytest.mark.parametrize(
    ("severity", "for_s", "kind"),
    [(Severity.CRITICAL, 30.0, SHRINK), (Severity.CRITICAL, 5.0, HOLD), (Severity.WARNING, 30.0, HOLD)],
)
def test_only_a_critical_condition_makes_the_world_smaller(
    severity: Severity, for_s: float, kind: DecisionKind
) -> None:
    condition = HostCondition("xid", severity, "A GPU fell off the bus.", "probe gpu", NOW - for_s)
    sick = host("b", job="job", conditions=(StandingCondition(condition),))
    seen = view(job=running(), hosts=cluster(sick), incidents=[departure("host_condition", for_s=for_s)], copies=COPIES)
    assert decided(decide(seen, [], SETTINGS, NOW)).kind is kind


# --- too few hosts ----------------------------------------------------------------------------------------------------

NO_MEMORY = PastFailure(2, "worker_exception", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", 50)


def out_of_memory(*free: str, error: PastFailure = NO_MEMORY, step: int = 50) -> View:
    """Three of four hosts restored step 40 and ran out of memory."""
    job = running("acd", ranks=tuple(rank(n, "acd"[n // 2], step=step) for n in range(6)))
    job = msgspec.structs.replace(job, failures=(error,))
    facts = {"state": IncidentState.DECIDING, "generation": 2, "action_id": "", "decisions_made": 0}
    failed = incident(cause="worker_exception", host_id="a", message="Rank 0 failed.", **facts)
    hosts = cluster(*(host(name) for name in free), names="acd")
    return view(job=job, hosts=hosts, incidents=[failed], copies=COPIES[:6])


def test_a_world_that_does_not_fit_waits_for_a_host_and_is_not_tried_again() -> None:
    decision = decided(decide(out_of_memory(), [], SETTINGS, NOW))
    assert (decision.kind, decision.rule) == (HOLD, "hold_what_does_not_fit")
    found = decided(decide(out_of_memory("x"), [], SETTINGS, NOW))
    assert (found.kind, found.rule) == (GROW, "restart_on_more_hosts")
    assert found.action is not None and found.action.next is not None and found.action.next.too_few_hosts == 3
    assert placed(found.action) == [("a", (0, 1)), ("c", (2, 3)), ("d", (4, 5)), ("x", (6, 7))]
    assert (found.action.spec.nnodes, found.action.spec.max_nodes) == (4, 0)


def test_a_free_host_that_the_job_may_not_take_does_not_end_the_wait_for_memory() -> None:
    """One with a warning, or another job's spare: another restart of as few would end alike, and fail the job."""
    warning = HostCondition("ecc-correctable", Severity.WARNING, "GPU 3 corrected 900 errors.", "probe gpu", NOW - 2)
    warned = host("x", conditions=(StandingCondition(warning),))
    seen = out_of_memory()
    outcome = decide(msgspec.structs.replace(seen, hosts=(*seen.hosts, warned)), [], SETTINGS, NOW)
    assert decided(outcome).rule == "hold_what_does_not_fit"
    other = JobSpec(job="other", argv=("t.py",), workdir="/", spares=1)
    spared = JobView(other, JobState.RUNNING, NOW - 99, False, None)
    both = msgspec.structs.replace(seen, jobs=(spared, *seen.jobs), hosts=(*seen.hosts, host("x")))
    assert [d.rule for d in decide(both, [], SETTINGS, NOW).decisions if d.job == "job"] == ["hold_what_does_not_fit"]


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (msgspec.structs.replace(NO_MEMORY, error_message="boom"), 50),
        (NO_MEMORY, 90),  # it made progress: it fits
    ],
)
def test_other_failures_of_a_smaller_world_restart_it(error: PastFailure, step: int) -> None:
    decision = decided(decide(out_of_memory(error=error, step=step), [], SETTINGS, NOW))
    assert decision.kind is DecisionKind.RESTART_IN_PLACE
    assert decision.action is not None and decision.action.spec.nnodes == 3
    assert decision.action.next is not None and decision.action.next.too_few_hosts == 0


def test_what_was_too_few_once_is_not_tried_after_the_next_loss() -> None:
    seen = lost_view("b", job=running(too_few_hosts=3))
    assert decided(decide(seen, [], SETTINGS, NOW)).rule == "wait_for_a_spare"


# --- starts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "for_s", "hosts"), [("abcd", 1.0, 4), ("abc", 30.0, 3), ("abc", 5.0, 0), ("a", 99.0, 0)]
)
def test_a_job_starts_on_fewer_hosts_when_no_further_host_comes(free: str, for_s: float, hosts: int) -> None:
    job = msgspec.structs.replace(submitted(), spec=SPEC, submitted_at=NOW - 100)
    outcome = decide(view(job=job, hosts=[host(n, since=NOW - for_s) for n in free]), [], SETTINGS, NOW)
    assert outcome.wake_at == 0.0 or outcome.wake_at > NOW, "a moment that has passed: rounds without a pause"
    if not hosts:
        assert not outcome.decisions and "it needs 4 hosts (at least 2)" in outcome.jobs[-1].message
        assert (outcome.wake_at == NOW - for_s + SETTINGS.shrink_after_s) is (len(free) > 1)
        return
    plan = decided(outcome).action
    assert plan is not None and (plan.spec.nnodes, plan.spec.asked_nnodes, len(placed(plan))) == (hosts, 4, hosts)


def test_a_job_that_goes_on_on_fewer_hosts_knows_how_many_ranks_saved_its_steps() -> None:
    before = on(NAMES, lineage=(LineageEntry(2),))
    job = msgspec.structs.replace(submitted(), spec=SPEC, submitted_at=NOW - 100, before=before)
    plan = decided(decide(view(job=job, hosts=[host(n) for n in "ab"]), [], SETTINGS, NOW)).action
    assert plan is not None and plan.next is not None and plan.history is not None
    assert plan.next.parent_lineage == plan.history.lineage == (LineageEntry(2, world_size=8),)


def test_a_specification_on_fewer_hosts_knows_how_many_it_asked_for() -> None:
    assert SPEC.on(3).world_size == 6
    assert SPEC.on(3).as_asked == SPEC and SPEC.on(3).on(2).on(4) == SPEC
