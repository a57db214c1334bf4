"""What the policy does about hosts that an operator wants to be left, and about notices that are taken back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy.checked import decide

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionState, DecisionKind, Incident, IncidentState
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import PreemptionNotice, Signal
from services.controller.round.view import (
    ActionView,
    DrainView,
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
ASKED = DrainView(DrainState.REQUESTED, NOW - 1, NOW + 299, "new fans")
OVERDUE = DrainView(DrainState.REQUESTED, NOW - 301, NOW - 1)
CANCELLED = DrainView(DrainState.CANCELLED, NOW - 1, NOW - 1)
SPEC = JobSpec(
    job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, checkpoint=CheckpointSpec(every_steps=10)
)
GENERATION = GenerationView(
    generation=2,
    parent=1,
    lineage=(LineageEntry(1, 40), LineageEntry(2)),
    hosts=(HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,))),
    peers={},
    started_at=NOW - 100,
    restore_step=40,
    restart_count=1,
    ranks=(RankView(0, "a", 52, Phase.STEP, NOW - 0.1), RankView(1, "b", 51, Phase.STEP, NOW - 0.1)),
)
JOB = JobView(SPEC, JobState.RUNNING, NOW - 1000, False, GENERATION, newest_step=52, message="running on a, b")


def host(name: str, *, state: HostState = HostState.HEALTHY, **more: object) -> HostView:
    job = "job" if name in "ab" else ""
    facts = {"since": NOW - 500, "last_report_at": NOW - 0.1, "job": job, "failure_domain": "", "free_port": 1}
    merged = {**facts, **more}
    return HostView(host_id=name, state=state, address="ip", engine_address=f"{name}:7", **merged)  # type: ignore[arg-type]  # a builder


def view(
    *hosts: HostView, incidents: Sequence[Incident] = (), actions: Sequence[ActionView] = (), job: JobView = JOB
) -> View:
    return View((job,), hosts, tuple(incidents), tuple(actions), (), 7, 70)


def look(seen: View, *signals: Signal, now: float = NOW) -> Outcome:
    return decide(seen, signals, SETTINGS, now)


def saved(outcome: Outcome, state: ActionState) -> ActionView:
    (decision,) = outcome.decisions
    assert decision.action is not None
    action_id = f"act-{decision.decision_id.removeprefix('dec-')}"
    return ActionView(action_id, decision.decision_id, "inc-7", decision.action, state, "save", NOW)


def test_a_drained_host_is_left_at_a_step_that_all_ranks_save() -> None:
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    (decision,) = first.decisions
    assert (decision.kind, decision.rule) == (DecisionKind.EMERGENCY_CHECKPOINT, "save_before_the_host_is_left")
    assert decision.action is not None and decision.action.emergency_step > 52 + 2
    assert decision.action.deadline_s == SETTINGS.action_deadline_s
    assert first.incidents[0].observed_at == ASKED.requested_at

    seen = view(
        host("a"),
        host("b", drain=ASKED),
        host("c"),
        incidents=first.incidents,
        actions=[saved(first, ActionState.SUCCEEDED)],
    )
    (moved,) = look(seen).decisions
    assert moved.kind is DecisionKind.MIGRATE_TO_SPARE
    assert moved.action is not None and moved.action.next is not None
    assert [part.host_id for part in moved.action.next.hosts] == ["a", "c"]


def test_ranks_that_stand_train_on_where_they_are_if_the_drain_is_taken_back() -> None:
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    for state in (ActionState.SUCCEEDED, ActionState.FAILED):
        acted = {"incidents": first.incidents, "actions": [saved(first, state)]}
        for drain in (CANCELLED, None):
            (decision,) = look(view(host("a"), host("b", drain=drain), host("c"), **acted)).decisions  # type: ignore[arg-type]  # as named
            assert (decision.kind, decision.rule) == (DecisionKind.RESUME, "let_the_ranks_go")
            assert decision.action is not None and decision.action.stop_hosts == ("a", "b")
            assert decision.action.emergency_step == 52, "steps beyond it show that they went on"


def test_ranks_that_stand_are_let_go_when_the_spare_is_lost() -> None:
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    seen = {"incidents": first.incidents, "actions": [saved(first, ActionState.SUCCEEDED)]}
    hosts = (host("a"), host("b", drain=ASKED), host("c", state=HostState.SILENT, last_report_at=NOW - 20))
    waits = look(view(*hosts, **seen))  # type: ignore[arg-type]  # as named
    assert (waits.decisions[0].kind, waits.wake_at) == (DecisionKind.HOLD, NOW + 3)
    seen["incidents"] = waits.incidents
    (decision,) = look(view(*hosts, **seen), now=NOW + 3).decisions  # type: ignore[arg-type]  # as named
    assert decision.kind is DecisionKind.RESUME


RELEASED = (ActionState.SUCCEEDED, ActionState.FAILED, ActionState.TIMED_OUT)


def resumed(state: ActionState) -> tuple[Sequence[Incident], ActionView]:
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    (decision,) = look(
        view(host("a"), host("b"), host("c"), incidents=first.incidents, actions=[saved(first, ActionState.SUCCEEDED)])
    ).decisions
    assert decision.action is not None
    acting = msgspec.structs.replace(first.incidents[0], action_id="act-71", state=IncidentState.ACTING)
    return [acting], ActionView("act-71", "dec-71", "inc-7", decision.action, state, "release", NOW)


@pytest.mark.parametrize("state", RELEASED)
def test_ranks_that_were_let_go_have_gone_on_when_they_step(state: ActionState) -> None:
    """Whatever the hosts answered: one with a full disk refuses the release, and may have refused the save, too."""
    incidents, action = resumed(state)
    (verifying,) = look(view(host("a"), host("b"), host("c"), incidents=incidents, actions=[action])).incidents
    assert (verifying.state, verifying.failed_step, verifying.lost_steps) == (IncidentState.VERIFYING, 52, 0)
    ranks = tuple(msgspec.structs.replace(rank, step=53) for rank in GENERATION.ranks)
    further = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    (closed,) = look(view(host("a"), host("b"), incidents=[verifying], actions=[action], job=further)).incidents
    assert closed.state is IncidentState.RESOLVED


@pytest.mark.parametrize("state", RELEASED)
def test_ranks_that_were_let_go_and_stand_all_the_same_start_again(state: ActionState) -> None:
    """No detector waits for a rank that is parked."""
    incidents, action = resumed(state)
    parked = tuple(msgspec.structs.replace(rank, phase=Phase.PARKED) for rank in GENERATION.ranks)
    standing = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=parked))
    seen = {"actions": [action], "job": standing}
    (verifying,) = look(view(host("a"), host("b"), host("c"), incidents=incidents, **seen)).incidents  # type: ignore[arg-type]  # as named
    later = NOW + 11.0
    hosts = [msgspec.structs.replace(host(name), last_report_at=later) for name in "abc"]
    (decision,) = look(view(*hosts, incidents=[verifying], **seen), now=later).decisions  # type: ignore[arg-type]  # as named
    assert decision.kind is DecisionKind.RESTART_IN_PLACE


def test_what_stood_in_an_earlier_generation_saves_again_or_is_over() -> None:
    """A failure made the job start again meanwhile, on the very host."""
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    (incident,) = first.incidents
    seen = {
        "incidents": [msgspec.structs.replace(incident, state=IncidentState.DECIDING)],
        "actions": [saved(first, ActionState.SUCCEEDED)],
        "job": msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, generation=3)),
    }
    (decision,) = look(view(host("a"), host("b", drain=ASKED), host("c"), **seen)).decisions  # type: ignore[arg-type]  # as named
    assert decision.kind is DecisionKind.EMERGENCY_CHECKPOINT
    (over,) = look(view(host("a"), host("b"), host("c"), **seen)).incidents  # type: ignore[arg-type]  # as named
    assert over.state is IncidentState.RESOLVED


@pytest.mark.parametrize(("ago_s", "is_void"), [(9.0, False), (11.0, True)])
def test_a_notice_is_void_when_its_host_outlives_it(ago_s: float, is_void: bool) -> None:
    first = look(view(host("a"), host("b", preempt_deadline_at=NOW + 9)))
    assert first.decisions[0].kind is DecisionKind.EMERGENCY_CHECKPOINT, "the last call, without a spare"
    now = NOW + 9 + ago_s
    hosts = (host("a", last_report_at=now), host("b", preempt_deadline_at=NOW + 9, last_report_at=now))
    seen = view(*hosts, incidents=first.incidents, actions=[saved(first, ActionState.SUCCEEDED)])
    outcome = look(seen, now=now)
    assert [d.kind for d in outcome.decisions if d.action] == ([DecisionKind.RESUME] if is_void else [])
    assert [change.preempt_deadline_at for change in outcome.hosts] == ([0.0] if is_void else [])


def test_a_host_that_was_to_be_left_takes_its_ranks_back_if_the_spare_is_lost_first() -> None:
    """Else the job would stand until the operator gives the host back."""
    moved = (HostRanks("a", "ip", "a:7", (0,)), HostRanks("c", "ip", "c:7", (1,)))
    generation = msgspec.structs.replace(GENERATION, generation=3, hosts=moved, ranks=())
    job = msgspec.structs.replace(JOB, generation=generation)
    before = (host("a"), host("b", drain=ASKED), host("c"))
    first = look(view(*before))
    then = look(view(*before, incidents=first.incidents, actions=[saved(first, ActionState.SUCCEEDED)]))
    move = msgspec.structs.replace(saved(then, ActionState.DISPATCHED), phase="start")
    facts = {"incident_id": "inc-6", "state": IncidentState.ACTING, "action_id": move.action_id}
    acting = msgspec.structs.replace(first.incidents[0], **facts)
    lost = host("c", state=HostState.SILENT, job="job", last_report_at=NOW - 600)
    left = host("b", state=HostState.CORDONED, job="", drain=ASKED)
    outcome = look(view(host("a"), left, lost, incidents=[acting], actions=[move], job=job))
    decision = next(d for d in outcome.decisions if d.action is not None)
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "take_a_drained_host_back")
    (back,) = [change for change in outcome.hosts if change.host_id == "b"]
    assert (back.state, back.ended_drain) == (HostState.HEALTHY, ASKED)


def moved_to_c(*, ranks: tuple[RankView, ...] = ()) -> JobView:
    moved = (HostRanks("a", "ip", "a:7", (0,)), HostRanks("c", "ip", "c:7", (1,)))
    generation = msgspec.structs.replace(GENERATION, generation=3, hosts=moved, ranks=ranks, parent_lineage=())
    return msgspec.structs.replace(JOB, generation=generation)


def test_a_drained_host_that_was_cut_off_takes_its_ranks_back_if_those_that_took_them_are_lost() -> None:
    """Simulator seeds 300140 and 400226: its silence moved the ranks that stood on it, to a host that was gone."""
    before = (host("a"), host("b", drain=ASKED), host("c"))
    first = look(view(*before))
    drain = msgspec.structs.replace(first.incidents[0], state=IncidentState.ACTING, action_id="act-70")
    acted = [drain, msgspec.structs.replace(drain, incident_id="inc-8", cause="host_silent", action_id="act-71")]
    (moved,) = look(view(*before, incidents=first.incidents, actions=[saved(first, ActionState.SUCCEEDED)])).decisions
    assert moved.action is not None
    move = ActionView("act-71", "dec-71", "inc-8", moved.action, ActionState.DISPATCHED, "start", NOW)
    lost = host("c", state=HostState.SILENT, job="job", last_report_at=NOW - 600)
    cut = host("b", state=HostState.SILENT, job="", drain=ASKED, last_report_at=NOW - 600)
    actions = [saved(first, ActionState.SUPERSEDED), move]
    waits = look(view(host("a"), cut, lost, incidents=acted, actions=actions, job=moved_to_c()))
    assert {i.incident_id: i.state for i in waits.incidents} == dict.fromkeys(
        ("inc-7", "inc-8"), IncidentState.DECIDING
    )

    back = host("b", state=HostState.IN_REPAIR, job="", drain=ASKED, stale_jobs={"job": 2})
    incidents = {"incidents": waits.incidents, "actions": actions, "job": moved_to_c()}
    outcome = look(view(host("a"), back, lost, **incidents))  # type: ignore[arg-type]  # as named
    decision = next(d for d in outcome.decisions if d.action is not None)
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "take_a_drained_host_back")
    (change,) = [change for change in outcome.hosts if change.host_id == "b"]
    assert (change.state, change.ended_drain) == (HostState.HEALTHY, ASKED)


def test_a_drained_host_is_drained_when_its_ranks_train_elsewhere() -> None:
    first = look(view(host("a"), host("b", drain=ASKED), host("c")))
    drain = msgspec.structs.replace(first.incidents[0], state=IncidentState.DECIDING, action_id="act-70")
    overtaken = saved(first, ActionState.SUPERSEDED)
    hosts = (host("a"), host("b", job="", drain=ASKED), host("c", job="job"))
    trains = moved_to_c(ranks=GENERATION.ranks)
    outcome = look(view(*hosts, incidents=[drain], actions=[overtaken], job=trains))
    assert [incident.state for incident in outcome.incidents] == [IncidentState.RESOLVED]


def test_superseded_workers_on_a_drained_host_are_stopped_before_it_is_cordoned() -> None:
    """They would stand there, and keep its GPUs, until the operator gave it back."""
    stays = host("b", job="", drain=ASKED, state=HostState.IN_REPAIR, stale_jobs={"job": 2})
    outcome = look(view(host("a"), stays, host("c", job="job"), job=moved_to_c(ranks=GENERATION.ranks)))
    (decision,) = outcome.decisions
    assert (decision.rule, outcome.hosts) == ("stop_superseded_workers", ())
    gone = host("b", job="", drain=ASKED)
    (change,) = look(view(host("a"), gone, host("c", job="job"), job=moved_to_c(ranks=GENERATION.ranks))).hosts
    assert change.state is HostState.CORDONED


@pytest.mark.parametrize("ended", [ActionState.SUPERSEDED, ActionState.FAILED])
def test_a_host_that_the_job_has_left_is_no_reason_to_save(ended: ActionState) -> None:
    """Simulator seed 400210: the move had failed, and what another incident did about that left the host as well."""
    hosts = (host("a"), host("b", job="", preempt_deadline_at=NOW + 25), host("c", job="job"), host("d"))
    first = look(view(host("a"), host("b", preempt_deadline_at=NOW + 25), host("c")))
    then = look(
        view(
            *hosts[:1],
            host("b", preempt_deadline_at=NOW + 25),
            host("c"),
            incidents=first.incidents,
            actions=[saved(first, ActionState.SUCCEEDED)],
        )
    )
    move = msgspec.structs.replace(saved(then, ended), phase="stop")
    notice = msgspec.structs.replace(then.incidents[0], state=IncidentState.DECIDING, action_id=move.action_id)
    ranks = (RankView(0, "a", 52, Phase.STEP, NOW - 0.1), RankView(1, "c", 52, Phase.STEP, NOW - 0.1))
    further = moved_to_c(ranks=ranks)
    assert further.generation is not None
    further = msgspec.structs.replace(further, generation=msgspec.structs.replace(further.generation, generation=4))
    outcome = look(view(*hosts, incidents=[notice], actions=[move], job=further))
    assert [incident.state for incident in outcome.incidents] == [IncidentState.RESOLVED]
    assert not [decision for decision in outcome.decisions if decision.action is not None]


@pytest.mark.parametrize(("asked", "left_to"), [({"drain": ASKED}, "b"), ({"preempt_deadline_at": NOW + 60}, "")])
def test_ranks_that_stand_are_let_go_with_the_incident_that_took_too_many_decisions(
    asked: dict[str, object], left_to: str
) -> None:
    """They stood until the engine's own 120 s were over."""
    first = look(view(host("a"), host("b", **asked), host("c")))
    standing = msgspec.structs.replace(
        first.incidents[0], state=IncidentState.DECIDING, decisions_made=SETTINGS.max_decisions_per_incident
    )
    actions = [saved(first, ActionState.FAILED)]
    outcome = look(view(host("a"), host("b", **asked), host("c"), incidents=[standing], actions=actions))
    (decision,) = outcome.decisions
    assert decision.kind is DecisionKind.RESUME
    assert decision.action is not None and decision.action.stop_hosts == ("a", "b")
    assert outcome.incidents[0].state is IncidentState.ESCALATED
    (change,) = outcome.hosts
    assert (change.host_id, change.ended_drain is not None) == ("b", bool(left_to))


def test_without_a_spare_training_goes_on_and_the_operator_is_told_once() -> None:
    first = look(view(host("a"), host("b", drain=ASKED)))
    (decision,) = first.decisions
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "wait_for_a_spare", None)
    assert decision.evidence == {"host": "b", "remaining_s": 299.0}
    assert first.wake_at == NOW + 1.0
    again = look(view(host("a"), host("b", drain=ASKED), incidents=first.incidents))
    assert again.empty and again.wake_at > NOW
    (later,) = look(view(host("a"), host("b", drain=ASKED), host("c"), incidents=first.incidents)).decisions
    assert later.kind is DecisionKind.EMERGENCY_CHECKPOINT


def test_a_drain_that_finds_no_spare_in_time_is_refused_and_the_job_left_alone() -> None:
    waiting = look(view(host("a"), host("b", drain=ASKED))).incidents
    outcome = look(view(host("a"), host("b", drain=OVERDUE), incidents=waiting))
    (decision,) = outcome.decisions
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "refuse_what_took_too_long", None)
    assert [(c.host_id, c.state, c.ended_drain) for c in outcome.hosts] == [("b", HostState.HEALTHY, OVERDUE)]
    assert outcome.incidents[0].state is IncidentState.ESCALATED
    assert decision.evidence == {"host": "b", "decisions": 0}
    moved = look(
        view(host("a"), host("b", job="", drain=OVERDUE), host("c", job="job"), incidents=waiting, job=moved_to_c())
    )
    assert "refuse_what_took_too_long" not in {d.rule for d in moved.decisions}, "its ranks are elsewhere by now"
    refused = msgspec.structs.replace(OVERDUE, state=DrainState.REFUSED)
    assert look(view(host("a"), host("b", drain=refused), host("c"))).empty, "it is not tried again"


def test_ranks_that_are_starting_are_moved_when_they_train() -> None:
    ranks = (RankView(0, "a", -1, Phase.STARTING, NOW - 0.1), RankView(1, "b", -1, Phase.RESTORING, NOW - 0.1))
    fresh = msgspec.structs.replace(GENERATION, ranks=ranks, started_at=NOW - 2)
    job = msgspec.structs.replace(JOB, generation=fresh)
    hosts = (host("a"), host("b", drain=ASKED), host("c"))
    (decision,) = look(view(*hosts, job=job)).decisions
    assert (decision.kind, decision.rule) == (DecisionKind.HOLD, "wait_until_all_ranks_step")
    assert decision.evidence == {"host": "b", "generation": 2}
    (still,) = look(view(*hosts, job=job), now=NOW - 2 + SETTINGS.action_deadline_s - 0.1).decisions
    assert still.rule == "wait_until_all_ranks_step"
    plain = msgspec.structs.replace(fresh, started_at=NOW - SETTINGS.action_deadline_s)
    (decision,) = look(view(*hosts, job=msgspec.structs.replace(JOB, generation=plain))).decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE, "a script that never attaches is not waited for for ever"


def test_a_drain_taken_back_before_anything_was_done_leaves_no_trace() -> None:
    waiting = look(view(host("a"), host("b", drain=ASKED))).incidents
    outcome = look(view(host("a"), host("b", drain=CANCELLED), incidents=waiting))
    assert not outcome.decisions and outcome.incidents[0].state is IncidentState.RESOLVED
    assert outcome.hosts[0].ended_drain == CANCELLED


def test_a_failure_goes_first_and_leaves_the_drained_host_too() -> None:
    silent = host("a", state=HostState.SILENT, since=NOW - 5, last_report_at=NOW - 5)
    outcome = look(view(silent, host("b", drain=ASKED), host("c"), host("d")))
    kinds = {decision.kind: decision for decision in outcome.decisions}
    moved = kinds[DecisionKind.MIGRATE_TO_SPARE]
    assert moved.action is not None and moved.action.next is not None
    assert {part.host_id for part in moved.action.next.hosts} == {"c", "d"}
    assert DecisionKind.EMERGENCY_CHECKPOINT not in kinds


def test_a_drained_host_without_ranks_is_cordoned_and_gets_none() -> None:
    outcome = look(view(host("a"), host("b"), host("c", drain=ASKED)))
    (decision,) = outcome.decisions
    assert (decision.kind, decision.job, decision.evidence) == (DecisionKind.CORDON, "", {"host": "c"})
    assert outcome.hosts[0].state is HostState.CORDONED
    assert look(view(host("a"), host("b"), host("c", state=HostState.CORDONED, drain=ASKED))).empty


@pytest.mark.parametrize("notice_at", [0.0, NOW + 5.0])
def test_an_operator_gives_a_cordoned_host_back(notice_at: float) -> None:
    cordoned = host("c", state=HostState.CORDONED, drain=CANCELLED, preempt_deadline_at=notice_at)
    outcome = look(view(host("a"), host("b"), cordoned))
    assert [decision.kind for decision in outcome.decisions] == [DecisionKind.UNCORDON]
    (change,) = outcome.hosts
    assert (change.state, change.preempt_deadline_at, change.ended_drain) == (HostState.SPARE, 0.0, CANCELLED)
    with_ranks = host("b", state=HostState.CORDONED, drain=CANCELLED)
    assert look(view(host("a"), with_ranks)).hosts[0].state is HostState.HEALTHY


def test_a_notice_that_is_taken_back_frees_the_host() -> None:
    void = Signal("c", "i1", 1, NOW, PreemptionNotice(deadline_at=0.0, source="sigterm"))
    noticed = host("c", state=HostState.CORDONED, preempt_deadline_at=NOW + 9)
    (change,) = look(view(host("a"), host("b"), noticed), void).hosts
    assert (change.state, change.preempt_deadline_at) == (HostState.SPARE, 0.0)
    assert not look(view(host("a"), host("b"), host("c")), void).hosts, "there was none"
    drained = msgspec.structs.replace(noticed, drain=ASKED)
    (change,) = look(view(host("a"), host("b"), drained), void).hosts
    assert change.state is HostState.CORDONED, "an operator still wants it to be left"


def test_a_host_that_outlives_its_notice_is_a_spare_again() -> None:
    def cordoned(seen_at: float) -> HostView:
        return host("c", state=HostState.CORDONED, preempt_deadline_at=NOW - 40, last_report_at=seen_at)

    assert not look(view(host("a"), host("b"), cordoned(NOW - 20))).hosts
    (change,) = look(view(host("a"), host("b"), cordoned(NOW - 1))).hosts
    assert (change.state, change.preempt_deadline_at) == (HostState.SPARE, 0.0)


def repeating(*, step: int, phase: Phase = Phase.STEP) -> JobView:
    """A job whose restart went back to step 10, far behind the step that it had come to."""
    ranks = tuple(RankView(number, "ab"[number], step, phase, NOW - 0.1) for number in range(2))
    return msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, restore_step=10, ranks=ranks))


FAR_BEHIND = Incident(
    incident_id="inc-1",
    job="job",
    host_id="b",
    cause="loss_diverged",
    state=IncidentState.VERIFYING,
    opened_at=NOW - 5000,
    since=NOW - 4000,
    message="The loss was not a number.",
    generation=1,
    failed_step=9000,
    restored_step=10,
)


def test_a_host_is_left_while_ranks_repeat_steps_after_another_failure() -> None:
    """They may do that for days until the failure counts as recovered."""
    asked = (host("a"), host("b", drain=ASKED), host("c"))
    opened = look(view(*asked, incidents=[FAR_BEHIND], job=repeating(step=12)))
    assert [(d.kind, d.rule) for d in opened.decisions] == [
        (DecisionKind.EMERGENCY_CHECKPOINT, "save_before_the_host_is_left")
    ]
    waits = look(view(*asked, incidents=[FAR_BEHIND], job=repeating(step=10, phase=Phase.RESTORING)))
    assert [d.rule for d in waits.decisions] == ["let_the_other_incident_go_first"], "they do not train yet"


def test_a_failure_is_no_failure_again_because_its_ranks_stand_for_a_drain() -> None:
    """Else the job would start anew from a drain's parked ranks, and again after each."""
    before = (host("a"), host("b", drain=ASKED), host("c"))
    first = look(view(*before, incidents=[FAR_BEHIND], job=repeating(step=12)))
    parked = repeating(step=12, phase=Phase.PARKED)
    both = [FAR_BEHIND, *first.incidents]
    for state in (ActionState.DISPATCHED, ActionState.SUCCEEDED):
        outcome = look(view(*before, incidents=both, actions=[saved(first, state)], job=parked))
        assert not any(one.incident_id == FAR_BEHIND.incident_id for one in outcome.incidents)
    alone = look(view(*before[:1], host("b"), host("c"), incidents=[FAR_BEHIND], job=parked), now=NOW)
    assert [one.state for one in alone.incidents] == [IncidentState.ACTING], "nothing will release them"


def test_a_started_generation_has_time_to_report_though_its_incident_waits_for_long() -> None:
    """After a drain moved ranks that repeat the steps of another failure."""
    moved = msgspec.structs.replace(GENERATION, generation=3, started_at=NOW - 5, restore_step=12, ranks=())
    fresh = msgspec.structs.replace(JOB, generation=moved)
    outcome = look(view(host("a"), host("b"), host("c"), incidents=[FAR_BEHIND], job=fresh))
    assert not outcome.decisions and not outcome.incidents
    assert outcome.wake_at == NOW + 5


MOVED_AT = NOW + 5
LATER = NOW + 5000


def moving() -> tuple[ActionView, Incident]:
    """A drain's move of ranks that repeat steps after another failure, and the drain."""
    before = (host("a"), host("b", drain=ASKED), host("c"))
    first = look(view(*before, incidents=[FAR_BEHIND], job=repeating(step=12)))
    both = [FAR_BEHIND, *first.incidents]
    parked = repeating(step=20, phase=Phase.PARKED)
    then = look(view(*before, incidents=both, actions=[saved(first, ActionState.SUCCEEDED)], job=parked))
    (drain,) = (one for one in then.incidents if one.cause == "drain_requested")
    verifying = msgspec.structs.replace(
        drain, state=IncidentState.VERIFYING, since=NOW + 6, failed_step=20, restored_step=20
    )
    return saved(then, ActionState.SUCCEEDED), verifying


@pytest.mark.parametrize("phase", [None, Phase.STARTING, Phase.RESTORING])
def test_a_drain_and_a_failure_do_not_wait_for_each_other(phase: Phase | None) -> None:
    """The drain has moved the ranks, and these never train: the job would stand for good."""
    move, drain = moving()
    assert move.plan.next is not None
    step = 20 if phase is Phase.RESTORING else -1
    ranks = () if phase is None else tuple(RankView(n, "ac"[n], step, phase, LATER - 0.1) for n in range(2))
    generation = msgspec.structs.replace(
        GENERATION,
        generation=move.plan.next.generation,
        parent=GENERATION.generation,
        hosts=move.plan.next.hosts,
        started_at=MOVED_AT,
        restore_step=20,
        ranks=ranks,
    )
    job = msgspec.structs.replace(JOB, generation=generation)
    hosts = (
        host("a", last_report_at=LATER - 0.1),
        host("b", job="", state=HostState.CORDONED, drain=ASKED, last_report_at=LATER - 0.1),
        host("c", job="job", last_report_at=LATER - 0.1),
    )
    outcome = look(view(*hosts, incidents=[FAR_BEHIND, drain], actions=[move], job=job), now=LATER)
    assert [d.kind for d in outcome.decisions if d.action] == [DecisionKind.RESTART_IN_PLACE]


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_move_that_fails_beside_a_failure_is_tried_again(is_given_up: bool) -> None:
    """By its drain, or by the failure if the drain is over: the move's generation has no ranks (swarm seed 2683)."""
    move, drain = moving()
    assert move.plan.next is not None
    facts = {"generation": move.plan.next.generation, "hosts": move.plan.next.hosts, "started_at": 0.0, "ranks": ()}
    job = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, **facts))
    hosts = [msgspec.structs.replace(host(name), last_report_at=LATER - 0.1) for name in "abc"]
    failed = msgspec.structs.replace(move, state=ActionState.FAILED)
    deciding = msgspec.structs.replace(drain, state=IncidentState.DECIDING)
    incidents = [FAR_BEHIND] if is_given_up else [FAR_BEHIND, deciding]
    outcome = look(view(*hosts, incidents=incidents, actions=[failed], job=job), now=LATER)
    acts = [decision.incident_id for decision in outcome.decisions if decision.action]
    assert acts == [(FAR_BEHIND if is_given_up else drain).incident_id]


def test_ranks_that_stand_for_a_cancelled_drain_start_again_beside_a_failure() -> None:
    """They repeated its steps, and did not go on when they were let go. The detector does not watch parked ranks."""
    asked, cancelled = host("b", drain=ASKED), host("b", drain=CANCELLED)
    first = look(view(host("a"), asked, host("c"), incidents=[FAR_BEHIND], job=repeating(step=12)))
    parked = repeating(step=12, phase=Phase.PARKED)
    both = [FAR_BEHIND, *first.incidents]
    done = [saved(first, ActionState.SUCCEEDED)]
    let_go = look(view(host("a"), cancelled, host("c"), incidents=both, actions=done, job=parked))
    assert [d.kind for d in let_go.decisions if d.action] == [DecisionKind.RESUME]
    (drain,) = let_go.incidents
    verifying = msgspec.structs.replace(drain, state=IncidentState.VERIFYING, since=NOW + 1)
    hosts = [msgspec.structs.replace(one, last_report_at=LATER - 0.1) for one in (host("a"), cancelled, host("c"))]
    actions = [saved(let_go, ActionState.SUCCEEDED)]
    outcome = look(view(*hosts, incidents=[FAR_BEHIND, verifying], actions=actions, job=parked), now=LATER)
    assert [d.rule for d in outcome.decisions if d.action] == ["restart_ranks_that_did_not_go_on"]
