"""What the policy does about hosts that cannot start their ranks: a place is blamed before the job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy.checked import decide

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Decision,
    DecisionKind,
    FailedStart,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.reports.signals import Signal, WorkerStartFailed
from services.controller.round.view import (
    ActionView,
    GenerationView,
    HostView,
    JobView,
    Outcome,
    PolicySettings,
    RankView,
    View,
)

NOW = 10_000.0
SETTINGS = PolicySettings()
SPEC = JobSpec(
    job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, checkpoint=CheckpointSpec(every_steps=1)
)
GENERATION = GenerationView(
    generation=3,
    parent=2,
    lineage=(LineageEntry(2, 40), LineageEntry(3)),
    hosts=(HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,))),
    peers={},
    started_at=NOW - 1,
    restore_step=40,
    restart_count=3,
)
RANK = RankView(0, "a", -1, Phase.STARTING, NOW)
MISSING, FULL, PORT = "not_found", "storage_full", "port_in_use"


def host(name: str, state: HostState = HostState.HEALTHY) -> HostView:
    job = "job" if name in "ab" else ""
    return HostView(name, state, NOW - 500, "ip", "", f"{name}:7", 1, NOW - 0.1, job=job)


def job(generation: GenerationView = GENERATION, *, nnodes: int = 2) -> JobView:
    spec = msgspec.structs.replace(SPEC, nnodes=nnodes, max_restarts=3)
    generation = msgspec.structs.replace(generation, hosts=generation.hosts[:nnodes])
    return JobView(spec, JobState.RUNNING, NOW - 1000, False, generation, newest_step=40)


def incident(*starts: FailedStart, **more: object) -> Incident:
    facts = {"generation": 3, "failed_starts": starts, "cause": "worker_start_failed", **more}
    return Incident(
        incident_id="inc-1",
        job="job",
        host_id="a",
        state=IncidentState.DECIDING,
        opened_at=NOW - 90,
        since=NOW - 1,
        message="Rank 0 could not be started on a: no script.",
        failed_step=40,
        decisions_made=7,
        **facts,  # type: ignore[arg-type]  # a builder
    )


def action(phase: str, **failed: str) -> ActionView:
    granted = GenerationPlan("job", 3, 2, GENERATION.hosts, {}, (), restart_count=3)
    plan = ActionPlan(DecisionKind.RESTART_IN_PLACE, "job", SPEC, 2, stop_hosts=("a", "b"), next=granted)
    said = {name: (code, "no") for name, code in failed.items()}
    return ActionView("act-1", "dec-1", "inc-1", plan, ActionState.FAILED, phase, NOW - 3, "no", failed=said)


def failed(on: str, code: str, rank: int = 0) -> Signal:
    return Signal(on, "i1", 1 + rank, NOW, WorkerStartFailed("job", 3, rank, "no script", code))


def look(
    view_of: JobView,
    *hosts: HostView,
    signals: Sequence[Signal] = (),
    incidents: Sequence[Incident] = (),
    actions: Sequence[ActionView] = (),
    copies: Sequence[ShardCopy] = (),
    now: float = NOW,
) -> Outcome:
    return decide(
        View((view_of,), hosts, tuple(incidents), tuple(actions), tuple(copies), 7, 70), signals, SETTINGS, now
    )


def moves(decision: Decision) -> list[str]:
    assert decision.action is not None and decision.action.next is not None
    return [part.host_id for part in decision.action.next.hosts]


def test_one_host_that_cannot_start_is_left_and_gets_no_work() -> None:
    outcome = look(job(nnodes=1), host("a"), host("c"), signals=[failed("a", MISSING)])
    (decision,) = outcome.decisions
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "leave_a_host_that_cannot_start")
    assert moves(decision) == ["c"]
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.restart_count == 3
    (change,) = [c for c in outcome.hosts if c.host_id == "a"]
    assert (change.state, change.reason) == (HostState.CORDONED, decision.reason)
    assert outcome.incidents[0].decisions_made == 0


def test_whether_others_fail_alike_is_seen_first() -> None:
    first = look(job(), host("a"), host("b"), host("c"), signals=[failed("a", MISSING)])
    (held,) = first.decisions
    assert (held.rule, held.action) == ("wait_for_the_other_starts", None)
    until = first.incidents[0].hold_until
    assert first.wake_at == until == NOW + SETTINGS.root_cause_window_s
    answers = {"incidents": first.incidents, "signals": [failed("a", MISSING)]}
    late = look(job(), host("a"), host("b"), host("c"), **answers, now=until)  # type: ignore[arg-type]  # as named
    assert "wait_for_the_other_starts" not in {decision.rule for decision in late.decisions} and late.decisions
    both = look(job(), host("a"), host("b"), host("c"), incidents=first.incidents, signals=[failed("b", MISSING, 1)])
    (decision,) = both.decisions
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "start_again")
    assert not both.hosts, "no host is to blame for what is missing everywhere"


def test_what_fails_on_the_spare_too_is_no_hosts_fault() -> None:
    known = incident(FailedStart("c", MISSING, 2, NOW - 5))
    quarantined = host("c", HostState.CORDONED)
    outcome = look(job(nnodes=1), host("a"), quarantined, incidents=[known], signals=[failed("a", MISSING)])
    assert [(c.host_id, c.state) for c in outcome.hosts] == [("c", HostState.SPARE)]
    given_back, again = outcome.decisions
    assert given_back.kind is DecisionKind.UNCORDON and again.rule == "start_again"


def test_a_host_that_is_cordoned_for_another_reason_stays_so() -> None:
    known = incident(FailedStart("c", MISSING, 2, NOW - 5))
    noticed = msgspec.structs.replace(host("c", HostState.CORDONED), preempt_deadline_at=NOW + 60)
    outcome = look(job(nnodes=1), host("a"), noticed, incidents=[known], signals=[failed("a", MISSING)])
    assert outcome.hosts == () and outcome.decisions[-1].rule == "start_again"
    ours = incident(FailedStart("c", PORT, 2, NOW - 5))
    cordoned = host("c", HostState.CORDONED)
    assert look(job(nnodes=1), host("a"), cordoned, incidents=[ours], signals=[failed("a", PORT)]).hosts == ()


@pytest.mark.parametrize(("code", "times"), [(PORT, 3), (PORT, 1), ("store_ended", 2), ("interrupted", 1)])
def test_what_is_ours_is_tried_again_and_costs_nothing(code: str, times: int) -> None:
    known = incident(FailedStart("a", code, 2, NOW - 5, times - 1)) if times > 1 else incident()
    hosts = (host("a"), host("b"), host("c"))
    saved = [ShardCopy("job", 2, 40, number, Tier.MEMORY, "a", 1, "d") for number in (0, 1)]
    outcome = look(job(), *hosts, incidents=[known], signals=[failed("a", code)], copies=saved, now=NOW + 30)
    (decision,) = outcome.decisions
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "start_again")
    assert outcome.incidents[-1].decisions_made == 7, "nor does it count against the incident"


def test_a_host_whose_ports_are_all_taken_is_left_after_all() -> None:
    known = incident(FailedStart("a", PORT, 2, NOW - 5, 3))
    outcome = look(job(nnodes=1), host("a"), host("c"), incidents=[known], signals=[failed("a", PORT)])
    assert outcome.decisions[-1].rule == "leave_a_host_that_cannot_start"


def test_pauses_between_starts_grow() -> None:
    known = incident(FailedStart("a", MISSING, 3, NOW - 20, 5))
    (held,) = look(job(nnodes=1), host("a"), incidents=[known], actions=[action("start", a=MISSING)]).decisions
    assert held.reason.endswith("The next attempt is in 3.0 s.")


AWAY = msgspec.structs.replace(host("z", HostState.SILENT), last_report_at=NOW - 900)
BUSY = msgspec.structs.replace(host("z"), job="another")


@pytest.mark.parametrize(
    ("codes", "generation", "others", "is_over"),
    [
        ({"a": MISSING}, 3, (), True),
        ({"a": MISSING, "b": MISSING}, 3, (host("b"), host("c")), True),
        ({"a": MISSING}, 3, (AWAY,), False),  # a host that could start it may come back
        ({"a": FULL}, 3, (BUSY,), False),  # a busy one may be free one day
        ({"a": FULL, "c": MISSING}, 2, (host("c"),), False),  # a share was away, and is back: only the disk is full
        ({"a": FULL, "c": FULL}, 2, (host("c"),), True),
    ],
)
def test_a_job_that_no_host_can_start_fails_when_patience_is_over(
    codes: dict[str, str], generation: int, others: tuple[HostView, ...], is_over: bool
) -> None:
    """`generation`: the last one in which hosts other than a failed."""
    starts = [FailedStart(name, code, 3 if name == "a" else generation, NOW - 121, 9) for name, code in codes.items()]
    (decision,) = look(
        job(nnodes=2 if "b" in codes else 1), host("a"), *others, incidents=[incident(*starts)]
    ).decisions
    assert decision.kind is (DecisionKind.FAIL_JOB if is_over else DecisionKind.HOLD)
    assert not is_over or (decision.rule, decision.evidence["tried"]) == ("fail_what_starts_nowhere", ",".join(codes))


@pytest.mark.parametrize("code", ["error", "spawn_failed", "timed_out", "unreachable"])
def test_a_daemon_that_fails_by_itself_is_asked_again_before_its_host_is_blamed(code: str) -> None:
    outcome = look(job(), host("a"), host("b"), host("c"), incidents=[incident()], signals=[failed("a", code)])
    assert outcome.decisions[-1].rule == "start_again"


def test_failures_with_a_long_time_between_them_are_not_one_row_of_them() -> None:
    """A spare lacked the script, and was left; minutes later it is the share that is away, for all."""
    both = incident(*(FailedStart(name, MISSING, 2, NOW - 150, 3, NOW - 121) for name in "ab"))
    outcome = look(job(), host("a"), host("b"), incidents=[both], actions=[action("start", a=MISSING, b=MISSING)])
    assert outcome.decisions[-1].kind is not DecisionKind.FAIL_JOB
    assert {(start.first_at, start.times) for start in outcome.incidents[-1].failed_starts} == {(NOW, 1)}
    recent = incident(*(FailedStart(name, MISSING, 2, NOW - 50, 3, NOW - 20) for name in "ab"))
    outcome = look(job(), host("a"), host("b"), incidents=[recent], actions=[action("start", a=MISSING, b=MISSING)])
    assert {(s.first_at, s.times, s.last_at) for s in outcome.incidents[-1].failed_starts} == {(NOW - 50, 4, NOW)}
    (held,) = outcome.decisions
    assert (held.rule, held.kind, held.evidence) == ("start_again", DecisionKind.HOLD, {"times": 4})


def test_a_host_that_can_note_nothing_is_left_without_its_answer() -> None:
    stuck = incident(generation=2, cause="worker_killed", action_id="act-1")
    generation = msgspec.structs.replace(GENERATION, started_at=0.0)
    seen = {"incidents": [stuck], "actions": [action("stop", a=FULL)]}
    hosts = (host("a"), host("b"), host("c"))
    (decision,) = look(job(generation), *hosts, **seen).decisions  # type: ignore[arg-type]  # as named
    assert (decision.rule, moves(decision)) == ("leave_a_host_that_cannot_start", ["c", "b"])
    assert decision.action is not None
    assert (decision.action.stop_hosts, decision.action.unreachable_hosts) == (("b",), ("a",))
    held = [ShardCopy("job", 2, 40, number, Tier.MEMORY, "a", 1, "x") for number in (0, 1)]
    (kept,) = look(job(generation), *hosts, copies=held, **seen).decisions  # type: ignore[arg-type]  # as named
    assert kept.kind in (DecisionKind.RESTART_IN_PLACE, DecisionKind.HOLD), "the only recovery point is there"


def test_a_failed_start_is_known_by_the_answer_alone() -> None:
    """A daemon whose disk is full refuses the command before it could signal anything; it is the job's first."""
    started = action("start", a=FULL)
    outcome = look(job(nnodes=1), host("a"), host("c"), actions=[msgspec.structs.replace(started, incident_id="")])
    assert (outcome.incidents[0].cause, moves(outcome.decisions[0])) == ("worker_start_failed", ["c"])


def test_hosts_that_started_show_that_nothing_is_missing_everywhere() -> None:
    known = incident(FailedStart("c", MISSING, 2, NOW - 5))
    ranks = (msgspec.structs.replace(RANK, rank=1, host_id="b"),)
    generation = msgspec.structs.replace(GENERATION, ranks=ranks)
    out = msgspec.structs.replace(host("c", HostState.CORDONED), since=NOW - 4000)  # not within the last hour
    hosts = (host("a"), host("b"), out, host("d"))
    outcome = look(job(generation), *hosts, incidents=[known], signals=[failed("a", MISSING)])
    (decision,) = outcome.decisions
    assert moves(decision) == ["d", "b"]
    assert [(c.host_id, c.state) for c in outcome.hosts] == [("a", HostState.CORDONED)]


def test_a_start_on_record_as_failed_says_nothing_of_a_host_whose_ranks_train() -> None:
    """A daemon that was restarted while it started them answers that it was interrupted; they train all the same."""
    ranks = tuple(RankView(number, on, 45, Phase.STEP, NOW - 0.1) for number, on in enumerate("ab"))
    training = msgspec.structs.replace(GENERATION, started_at=NOW - 60, ranks=ranks)
    assert not look(job(training), host("a"), host("b"), actions=[action("start", a="interrupted")]).decisions
    half = msgspec.structs.replace(training, ranks=ranks[1:])
    outcome = look(job(half), host("a"), host("b"), actions=[action("start", a="interrupted")])
    assert [found.cause for found in outcome.incidents] == ["worker_start_failed"]
