"""What the policy does about conditions of hosts."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
    HOSTS,
    JOB,
    NOW,
    SETTINGS,
    action,
    exited,
    host,
    incident,
    say,
    submitted,
    view,
    with_exit,
)

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.orders import Order, OrderKind
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, ConditionsStand, SignalBody
from services.controller.round.view import (
    ActionView,
    ConditionChange,
    DrainView,
    HostView,
    JobView,
    Outcome,
    PastFailure,
    StandingCondition,
    View,
)

ECC = HostCondition("ecc-correctable", Severity.WARNING, "GPU 3 corrected 900 errors.", "probe gpu", NOW - 2, "gpu 3")
LOST = HostCondition("gpu-lost", Severity.CRITICAL, "GPU 3 is gone.", "probe gpu", NOW - 1, "gpu 3")
TOLD = HostCondition("disk-full", Severity.INFO, "/ is 93 % full.", "probe disk", NOW - 1, "/")


def with_conditions(name: str, *conditions: HostCondition, overruled: bool = False, **more: object) -> HostView:
    standing = tuple(StandingCondition(condition, overruled) for condition in conditions)
    return host(name, conditions=standing, **more)


def on_b(*conditions: HostCondition, spare: HostView = HOSTS[2], **more: object) -> tuple[HostView, ...]:
    return (HOSTS[0], with_conditions("b", *conditions, job="job", **more), spare)


def look(seen: View, *bodies: SignalBody, now: float = NOW, source: str = "b") -> Outcome:
    signals = [say(body, source=source, seq=seq) for seq, body in enumerate(bodies, 1)]
    return decide(seen, signals, SETTINGS, now)


def acted(outcome: Outcome, state: ActionState) -> ActionView:
    decision = outcome.decisions[-1]
    assert decision.action is not None
    number = decision.decision_id.removeprefix("dec-")
    return ActionView(f"act-{number}", decision.decision_id, "inc-7", decision.action, state, "save", NOW)


def only(outcome: Outcome) -> tuple[DecisionKind, str]:
    (decision,) = outcome.decisions
    return decision.kind, decision.rule


def test_a_host_that_cannot_train_is_left_at_once() -> None:
    outcome = look(view(), ConditionBegan(LOST))
    assert only(outcome) == (DecisionKind.MIGRATE_TO_SPARE, "leave_a_broken_host")
    (decision,), (incident,) = outcome.decisions, outcome.incidents
    assert decision.action is not None and decision.action.next is not None
    assert [part.host_id for part in decision.action.next.hosts] == ["a", "c"]
    assert "b" in decision.action.stop_hosts, "its workers may still run"
    assert (incident.cause, incident.state, incident.host_id) == ("host_condition", IncidentState.ACTING, "b")
    assert incident.observed_at == incident.fault_at == LOST.since
    assert outcome.conditions == (ConditionChange("b", LOST),)


def test_a_warning_is_left_at_a_step_that_all_ranks_save() -> None:
    first = look(view(), ConditionBegan(ECC))
    assert only(first) == (DecisionKind.EMERGENCY_CHECKPOINT, "save_before_the_host_is_left")
    (decision,) = first.decisions
    assert decision.action is not None and decision.action.deadline_s == SETTINGS.action_deadline_s

    after = {"incidents": first.incidents, "hosts": on_b(ECC)}
    moved = look(view(**after, actions=[acted(first, ActionState.SUCCEEDED)]))
    assert only(moved) == (DecisionKind.MIGRATE_TO_SPARE, "migrate_what_is_saved")

    unsaved = [acted(first, ActionState.FAILED)]
    waits = look(view(**after, actions=unsaved), now=NOW + 20)
    assert only(waits) == (DecisionKind.HOLD, "let_the_ranks_go")
    heard = tuple(msgspec.structs.replace(h, last_report_at=NOW + 30) for h in on_b(ECC))
    released = look(view(incidents=waits.incidents, hosts=heard, actions=unsaved), now=NOW + 30)
    assert only(released) == (DecisionKind.RESUME, "release_what_could_not_be_saved")


def test_a_host_that_is_given_up_but_may_not_be_cordoned_is_not_tried_again_at_once() -> None:
    """Else all ranks park again and again, for a save that fails. What is worse is another matter, and so is the next
    generation."""
    first = look(view(), ConditionBegan(ECC))
    (undecided,) = (msgspec.structs.replace(one, state=IncidentState.DECIDING) for one in first.incidents)
    cordoned = host("d", state=HostState.CORDONED, since=NOW - 60)
    seen = view(hosts=(*on_b(ECC), cordoned), incidents=[undecided], actions=[acted(first, ActionState.FAILED)])
    outcome = look(seen, now=NOW + 1)
    assert only(outcome) == (DecisionKind.RESUME, "release_what_could_not_be_saved")
    assert outcome.incidents[0].state is IncidentState.ESCALATED and not outcome.hosts

    failures = tuple(change.failure for change in outcome.jobs if change.failure is not None)
    given_up = msgspec.structs.replace(JOB, failures=failures)
    assert look(view(job=given_up, hosts=(*on_b(ECC), cordoned)), now=NOW + 2).empty
    assert only(look(view(job=given_up, hosts=on_b(ECC, LOST)))) == (
        DecisionKind.MIGRATE_TO_SPARE,
        "leave_a_broken_host",
    )
    following = msgspec.structs.replace(GENERATION, generation=3)
    again = look(view(job=msgspec.structs.replace(given_up, generation=following), hosts=on_b(ECC)))
    assert only(again) == (DecisionKind.EMERGENCY_CHECKPOINT, "save_before_the_host_is_left")


def test_ranks_that_have_parked_for_a_warning_train_on_if_only_a_host_with_one_is_left() -> None:
    first = look(view(), ConditionBegan(ECC))
    parked = {"incidents": first.incidents, "actions": [acted(first, ActionState.SUCCEEDED)]}
    warned = with_conditions("c", ECC)
    waits = look(view(**parked, hosts=on_b(ECC, spare=warned)))  # type: ignore[arg-type]
    assert only(waits) == (DecisionKind.HOLD, "let_the_ranks_go") and waits.wake_at == NOW + 3
    seen = view(hosts=on_b(ECC, spare=warned), incidents=waits.incidents, actions=parked["actions"])  # type: ignore[arg-type]
    released = look(seen, now=NOW + 3)
    assert only(released) == (DecisionKind.RESUME, "let_the_ranks_go")
    assert not any(change.state is HostState.CORDONED for change in released.hosts)


def test_without_a_spare_the_job_trains_on() -> None:
    for condition in (ECC, LOST):
        outcome = look(view(hosts=on_b(condition)[:2]))
        assert only(outcome) == (DecisionKind.HOLD, "wait_for_a_spare")
        assert outcome.wake_at == NOW + 1


def test_a_job_that_saves_nothing_is_not_moved_for_a_warning() -> None:
    spec = msgspec.structs.replace(JOB.spec, checkpoint=CheckpointSpec(every_steps=0))
    job: JobView = msgspec.structs.replace(JOB, spec=spec)
    assert not spec.checkpoint.saves
    assert only(look(view(job=job, hosts=on_b(ECC)))) == (DecisionKind.HOLD, "stay_without_a_checkpoint")
    assert only(look(view(job=job, hosts=on_b(LOST)))) == (DecisionKind.MIGRATE_TO_SPARE, "leave_a_broken_host")


def test_information_is_on_record_and_nothing_else() -> None:
    outcome = look(view(), ConditionBegan(TOLD))
    assert (outcome.decisions, outcome.incidents, outcome.hosts) == ((), (), ())
    assert outcome.conditions == (ConditionChange("b", TOLD),)


def test_a_repetition_changes_nothing() -> None:
    told_again = msgspec.structs.replace(TOLD, since=NOW, evidence={"percent": 94})
    assert look(view(hosts=on_b(TOLD)), ConditionBegan(told_again)).empty
    ended = ConditionEnded("probe disk", "disk-full", "/")
    assert look(view(), ended).empty
    (change,) = look(view(hosts=on_b(TOLD)), ended, ended).conditions
    assert change.has_ended
    assert look(view(), ConditionBegan(ECC), source="nobody").empty


def test_conditions_whose_end_was_lost_end_once_their_host_says_what_stands() -> None:
    """The database is a backup, or the host lost its state folder. What others report by HTTP is not the host's."""
    api = msgspec.structs.replace(TOLD, source="api:dcgm")
    later = msgspec.structs.replace(TOLD, subject="/scratch", since=NOW + 1)  # told before what was sent earlier
    host_view = view(hosts=on_b(TOLD, api, LOST, later))
    stand = ConditionsStand((TOLD.source, LOST.source), (LOST.key,))
    assert look(host_view, stand).conditions == (ConditionChange("b", TOLD, has_ended=True),)
    assert look(host_view, ConditionsStand((LOST.source,), (LOST.key,))).conditions == (), (
        "of the disks it says nothing"
    )
    assert look(host_view, stand, source="c").conditions == ()


def event(boot: str) -> HostCondition:
    seen = {"event": True, "boot": boot} if boot else {"event": True}
    return HostCondition("xid", Severity.CRITICAL, "Xid 79.", "probe kernel-log", NOW - 3600, "gpu 3 xid 79", seen)


@pytest.mark.parametrize(
    ("happened", "now", "is_over"), [("b1", "b1", False), ("b1", "", False), ("", "b1", False), ("b1", "b2", True)]
)
def test_an_event_ends_with_its_boot_and_not_because_its_host_knows_nothing_of_it(
    happened: str, now: str, is_over: bool
) -> None:
    """A new state folder, or one that cannot be read: the kernel's log is read from its end."""
    xid = event(happened)
    idle = view(hosts=(*HOSTS[:2], cordoned(xid)))
    outcome = look(idle, ConditionsStand((xid.source,), (), now), source="c")
    assert outcome.conditions == ((ConditionChange("c", xid, has_ended=True),) if is_over else ())
    assert [decision.rule for decision in outcome.decisions] == ["release_a_recovered_host"] * is_over
    named = ConditionsStand((xid.source,), (xid.key,), now)
    assert look(idle, named, source="c").conditions == (), "it happened again"


def test_a_gpu_that_is_no_longer_listed_is_lost_until_its_host_is_rebooted() -> None:
    lost = msgspec.structs.replace(LOST, evidence={"boot": "b1"})
    idle = view(hosts=(*HOSTS[:2], cordoned(lost)))
    assert look(idle, ConditionsStand((lost.source,), (), "b1"), source="c").empty
    assert only(look(idle, ConditionsStand((lost.source,), (), "b2"), source="c"))[0] is DecisionKind.UNCORDON


def test_an_event_of_another_boot_is_another_event() -> None:
    """The database never got the end of the first."""
    xid, again = event("b1"), event("b2")
    idle = view(hosts=(*HOSTS[:2], with_conditions("c", xid, overruled=True, state=HostState.SPARE)))
    assert look(idle, ConditionBegan(xid), source="c").empty
    outcome = look(idle, ConditionBegan(again), source="c")
    assert outcome.conditions == (ConditionChange("c", again),)
    assert only(outcome) == (DecisionKind.CORDON, "cordon_a_host_with_a_condition")


def one_host_job() -> JobView:
    job = submitted()
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, nnodes=1))


def cordoned(*conditions: HostCondition, reason: str = "", **more: object) -> HostView:
    why = reason or f"no rank is on it, and it has a condition: {conditions[0].message}"
    return with_conditions("c", *conditions, state=HostState.CORDONED, reason=why, **more)


def test_an_idle_host_that_cannot_train_gets_no_work_while_the_condition_stands() -> None:
    outcome = look(view(), ConditionBegan(LOST), source="c")
    assert only(outcome) == (DecisionKind.CORDON, "cordon_a_host_with_a_condition")
    (change,) = outcome.hosts
    assert change.state is HostState.CORDONED and change.reason == cordoned(LOST).reason

    ended = ConditionEnded(LOST.source, LOST.kind, "gpu 3")
    for conditions in ((LOST,), (LOST, ECC)):
        freed = look(view(hosts=(*HOSTS[:2], cordoned(*conditions))), ended, source="c")
        assert only(freed) == (DecisionKind.UNCORDON, "release_a_recovered_host")
        assert freed.hosts[0].state is HostState.SPARE


def test_a_host_with_a_warning_is_the_last_choice_and_no_goal_of_a_move_for_a_warning() -> None:
    assert look(view(), ConditionBegan(ECC), source="c").decisions == (), "it is not cordoned"
    warned = with_conditions("c", ECC)
    alone = look(view(job=one_host_job(), hosts=(warned,)))
    assert only(alone) == (DecisionKind.START_JOB, "start_when_hosts_suffice")
    two = look(view(job=one_host_job(), hosts=(warned, host("d"))))
    action = two.decisions[0].action
    assert action is not None and action.next is not None and action.next.hosts[0].host_id == "d"
    assert only(look(view(hosts=on_b(ECC, spare=warned)))) == (DecisionKind.HOLD, "wait_for_a_spare")
    lost = (HOSTS[0], host("b", job="job", state=HostState.SILENT, since=NOW - 20, last_report_at=NOW - 30), warned)
    assert look(view(hosts=lost)).decisions[-1].kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_report_about_every_host_does_not_cordon_them_all() -> None:
    hosts = tuple(with_conditions(f"h{n}", LOST) for n in range(10))
    outcome = look(View((), hosts, (), (), (), 7, 70))
    assert [d.rule for d in outcome.decisions] == ["cordon_a_host_with_a_condition"] * 2, "a fifth of them"


@pytest.mark.parametrize("reason", ["it failed 3 times within 7 days", "its workers cannot start there"])
def test_the_end_of_a_condition_leaves_a_host_that_something_else_cordoned(reason: str) -> None:
    ended = ConditionEnded(LOST.source, LOST.kind, LOST.subject)
    outcome = look(view(hosts=(*HOSTS[:2], cordoned(LOST, reason=reason))), ended, source="c")
    assert outcome.decisions == () and outcome.hosts == ()


def test_a_job_that_cannot_leave_a_broken_host_starts_there_after_a_while() -> None:
    failed = view(job=with_exit(exited()), hosts=on_b(LOST)[:2])
    first = look(failed)
    late = NOW + SETTINGS.start_patience_s + 1
    hosts = tuple(msgspec.structs.replace(h, last_report_at=late) for h in failed.hosts)
    waits = msgspec.structs.replace(failed, hosts=hosts, incidents=first.incidents)
    assert "restart_on_a_broken_host" not in [d.rule for d in look(waits, now=late - 10).decisions]
    decision = next(d for d in look(waits, now=late).decisions if d.action is not None)
    assert (decision.kind, decision.rule) == (DecisionKind.RESTART_IN_PLACE, "restart_on_a_broken_host")


@pytest.mark.parametrize("has_failed_again", [False, True])
def test_ranks_that_failed_on_a_broken_host_once_more_wait_for_a_spare(has_failed_again: bool) -> None:
    generations = (1, 2) if has_failed_again else (2,)
    failures = tuple(PastFailure(number, "worker_exception", "ValueError", "boom", 50, "b") for number in generations)
    job = msgspec.structs.replace(with_exit(exited()), failures=failures)
    late = NOW + 2 * SETTINGS.start_patience_s
    hosts = tuple(msgspec.structs.replace(one, last_report_at=late) for one in on_b(LOST)[:2])
    facts = {"cause": "worker_exception", "state": IncidentState.DECIDING, "generation": 2, "action_id": ""}
    rules = [d.rule for d in look(view(job=job, hosts=hosts, incidents=[incident(**facts)]), now=late).decisions]
    assert rules[0] == ("wait_for_a_spare" if has_failed_again else "restart_on_a_broken_host")
    both = tuple(with_conditions(one.host_id, LOST, job="job", last_report_at=late) for one in hosts)
    rules = [d.rule for d in look(view(job=job, hosts=both, incidents=[incident(**facts)]), now=late).decisions]
    assert rules[0] == ("wait_for_a_spare" if has_failed_again else "restart_on_a_broken_host")


@pytest.mark.parametrize("state", [IncidentState.ACTING, IncidentState.VERIFYING])
def test_a_restart_leaves_a_host_that_turns_out_to_be_broken_before_it_fails_there_again(state: IncidentState) -> None:
    acting = state is IncidentState.ACTING
    restart = action(state=ActionState.DISPATCHED if acting else ActionState.SUCCEEDED, phase="stop")
    failed = incident(state=state, cause="worker_exception", restored_step=50)  # no rank has made a step since
    seen = view(job=JOB, incidents=[failed], actions=[restart])
    outcome = look(seen, ConditionBegan(LOST))
    decision = next(d for d in outcome.decisions if d.action is not None)
    assert (decision.incident_id, decision.rule) == ("inc-1", "migrate_to_spare")
    assert outcome.superseded_actions == (("act-1",) if acting else ())
    for told, source, hosts in ((LOST, "b", HOSTS[:2]), (ECC, "b", HOSTS), (LOST, "c", HOSTS)):
        goes_on = look(msgspec.structs.replace(seen, hosts=hosts), ConditionBegan(told), source=source)
        assert all(d.action is None for d in goes_on.decisions), "no host to go to, a warning, or a host without ranks"


def test_what_an_operator_cordoned_stays_cordoned_when_the_condition_ends() -> None:
    drain = DrainView(DrainState.REQUESTED, NOW - 50, NOW + 50)
    idle = cordoned(ECC, drain=drain)
    outcome = look(view(hosts=(*HOSTS[:2], idle)), ConditionEnded(ECC.source, ECC.kind, ECC.subject), source="c")
    assert outcome.decisions == () and outcome.hosts == ()

    kept_out = view(hosts=(*HOSTS[:2], cordoned(ECC)))
    ordered = msgspec.structs.replace(kept_out, orders=(Order(OrderKind.CORDON, "c", NOW - 50),))
    kept = look(ordered, ConditionEnded(ECC.source, ECC.kind, ECC.subject), source="c")
    assert kept.decisions == () and kept.hosts == () and kept.conditions[0].has_ended


def test_one_of_two_critical_conditions_that_ends_frees_nothing() -> None:
    worse = msgspec.structs.replace(ECC, severity=Severity.CRITICAL)
    idle = cordoned(worse, LOST)
    outcome = look(view(hosts=(*HOSTS[:2], idle)), ConditionEnded(LOST.source, LOST.kind, LOST.subject), source="c")
    assert outcome.decisions == () and len(outcome.conditions) == 1


def test_a_condition_with_a_time_of_its_own_ends_by_itself() -> None:
    short = msgspec.structs.replace(LOST, until=NOW + 30)
    hosts = (*HOSTS[:2], cordoned(short))
    assert look(view(hosts=hosts)).wake_at == NOW + 30
    outcome = look(view(hosts=hosts), now=NOW + 30)
    assert only(outcome) == (DecisionKind.UNCORDON, "release_a_recovered_host")
    assert outcome.conditions == (ConditionChange("c", short, has_ended=True),)


def test_an_operator_who_releases_the_host_overrules_what_stands_then() -> None:
    cancelled = DrainView(DrainState.CANCELLED, NOW - 1, NOW - 1)
    idle = with_conditions("c", LOST, state=HostState.CORDONED, drain=cancelled)
    outcome = look(view(hosts=(*HOSTS[:2], idle)))
    assert only(outcome) == (DecisionKind.UNCORDON, "release_an_undrained_host")
    assert outcome.conditions == (ConditionChange("c", LOST, is_overruled=True),)

    free = (*HOSTS[:2], with_conditions("c", ECC, overruled=True, state=HostState.SPARE))
    assert look(view(hosts=free)).empty
    again = msgspec.structs.replace(ECC, message="GPU 3 corrected 1200 errors.")
    assert look(view(hosts=free), ConditionBegan(again), source="c").decisions == ()
    worse = msgspec.structs.replace(ECC, severity=Severity.CRITICAL)
    assert only(look(view(hosts=free), ConditionBegan(worse), source="c"))[0] is DecisionKind.CORDON


def test_a_failed_job_does_not_start_again_on_a_broken_host() -> None:
    outcome = look(view(job=with_exit(exited()), hosts=on_b(LOST)))
    assert outcome.decisions[0].kind is DecisionKind.MIGRATE_TO_SPARE
    alone = look(view(job=with_exit(exited()), hosts=on_b(LOST)[:2]))
    assert "wait_for_a_spare" in [decision.rule for decision in alone.decisions]
    assert all(decision.kind is DecisionKind.HOLD for decision in alone.decisions)
    warned = look(view(job=with_exit(exited()), hosts=on_b(ECC)[:2]))
    assert DecisionKind.RESTART_IN_PLACE in [decision.kind for decision in warned.decisions]


def test_a_warning_that_turns_critical_before_its_save_moves_at_once() -> None:
    waits = look(view(hosts=on_b(ECC)[:2]))
    outcome = look(view(hosts=on_b(ECC, LOST), incidents=waits.incidents))
    assert only(outcome) == (DecisionKind.MIGRATE_TO_SPARE, "leave_a_broken_host")
    assert "(gpu-lost, probe gpu): GPU 3 is gone. 1 more condition stands." in outcome.decisions[0].reason


def test_a_condition_that_ends_closes_its_incident() -> None:
    waits = look(view(hosts=on_b(ECC)[:2]))
    outcome = look(view(hosts=on_b(ECC)[:2], incidents=waits.incidents), ConditionEnded(*_named(ECC)))
    assert [incident.state for incident in outcome.incidents] == [IncidentState.RESOLVED]
    assert outcome.decisions == () and GENERATION.hosts[1].host_id == "b"


def _named(condition: HostCondition) -> tuple[str, str, str]:
    return condition.source, condition.kind, condition.subject
