"""Guards hold back what rules want: maintenance windows, approvals, dry runs, and limits on actions and cordons."""

from __future__ import annotations

from collections.abc import Sequence

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
    SETTINGS,
    SPEC,
    action,
    decided,
    host,
    incident,
    say,
    view,
)

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionPlan, DecisionKind, IncidentState
from flyball.contracts.orders import AWAITS_APPROVAL, Order, OrderKind, OrderState
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from services.controller.round import blast_radius
from services.controller.round.choices.spare_choice import failures_of_hosts
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import DrainView, Fleet, HostView, Outcome, PolicySettings, StandingCondition, View
from services.controller.rules import guard_rules

RESTART = DecisionKind.RESTART_IN_PLACE
KILLED_INCIDENT = incident(generation=2, state=IncidentState.DECIDING, action_id="", decisions_made=0)


def by(settings: PolicySettings, seen: View | None = None) -> Outcome:
    return decide(seen or view(copies=SAVED), [say(KILLED)], settings, NOW)


def ordered(*orders: Order, seen: View | None = None) -> View:
    return msgspec.structs.replace(seen or view(copies=SAVED), orders=orders)


# --- dry run, approval, rate ------------------------------------------------------------------------------------------


def test_a_dry_run_records_what_it_would_do_and_does_nothing() -> None:
    outcome = by(PolicySettings(dry_run=True))
    decision = decided(outcome)
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "only_say_it_in_a_dry_run", None)
    assert decision.evidence["wanted"] == "restart_in_place"


def test_an_action_awaits_approval_and_is_carried_out_once_with_it() -> None:
    settings = PolicySettings(approve=(RESTART,))
    held = by(settings)
    decision = decided(held)
    assert (decision.kind, decision.rule) == (DecisionKind.HOLD, "wait_for_approval")
    (waiting,) = held.incidents
    assert waiting.holding_for == f"{AWAITS_APPROVAL}restart_in_place"
    assert f"awaiting approval: flyball approve {waiting.incident_id}." in decision.reason

    approval = Order(OrderKind.APPROVE, waiting.incident_id, NOW - 1, awaited="restart_in_place")
    assert decided(by(settings, ordered(approval, seen=_with(waiting)))).kind is RESTART
    other = msgspec.structs.replace(approval, awaited="migrate_to_spare")
    assert by(settings, ordered(other, seen=_with(waiting))).decisions == (), "it was for another kind of action"


def _with(waiting: object) -> View:
    return view(incidents=[waiting], copies=SAVED)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("seen", "is_over"),
    [
        (view(incidents=[KILLED_INCIDENT]), False),
        (view(), True),
        (view(incidents=[incident(action_id="act-2")], actions=[action(action_id="act-2", started_at=0.0)]), True),
        (view(incidents=[incident(action_id="act-1")], actions=[action(started_at=NOW + 9.0)]), False),
    ],
    ids=["nothing yet", "closed", "used", "an older action"],  # whatever the clocks of two machines say
)
def test_an_approval_is_over_with_the_next_action_or_its_incident(seen: View, is_over: bool) -> None:
    before = "" if seen.incidents == (KILLED_INCIDENT,) else "act-1"
    approval = Order(OrderKind.APPROVE, "inc-1", NOW - 1, awaited="restart_in_place", action_id=before)
    outcome = decide(ordered(approval, seen=seen), [], PolicySettings(approve=(RESTART,)), NOW)
    assert [change.state for change in outcome.orders] == ([OrderState.OVER] if is_over else [])


MOVE = DecisionKind.MIGRATE_TO_SPARE
SAVES_54 = ActionPlan(DecisionKind.EMERGENCY_CHECKPOINT, "job", SPEC, 2, stop_hosts=("a", "b"), emergency_step=54)
ALL_SAVED = action(plan=SAVES_54, phase="save")


def leaving(cause: str, notice_s: float = 60.0) -> tuple[HostView, ...]:
    ecc = HostCondition("ecc", Severity.WARNING, "ECC errors", "probe ecc", NOW - 5)
    facts: dict[str, dict[str, object]] = {
        "preemption_notice": {"preempt_deadline_at": NOW + notice_s},
        "drain_requested": {"drain": DrainView(DrainState.REQUESTED, NOW - 9, NOW + 300)},
        "host_condition": {"conditions": (StandingCondition(ecc),)},
    }
    return (HOSTS[0], host("b", job="job", **facts[cause]), HOSTS[2])


@pytest.mark.parametrize("approve", [(MOVE,), (MOVE, DecisionKind.EMERGENCY_CHECKPOINT)])
@pytest.mark.parametrize("cause", ["preemption_notice", "drain_requested", "host_condition"])
def test_one_approval_covers_a_move_and_the_save_before_it(cause: str, approve: tuple[DecisionKind, ...]) -> None:
    settings, hosts = PolicySettings(approve=approve), leaving(cause)
    held = decide(view(hosts=hosts), [], settings, NOW)
    decision, (waiting,) = decided(held), held.incidents
    assert (decision.rule, waiting.cause) == ("wait_for_approval", cause), "ranks that save would stand still"
    assert waiting.holding_for == f"{AWAITS_APPROVAL}migrate_to_spare"

    approval = Order(OrderKind.APPROVE, waiting.incident_id, NOW + 1, awaited="migrate_to_spare")
    saves = decide(ordered(approval, seen=view(hosts=hosts, incidents=[waiting])), [], settings, NOW + 2)
    assert decided(saves).kind is DecisionKind.EMERGENCY_CHECKPOINT

    (acting,) = saves.incidents
    done = msgspec.structs.replace(
        ALL_SAVED, action_id=acting.action_id, incident_id=acting.incident_id, started_at=NOW + 2
    )
    moves = decide(ordered(approval, seen=view(hosts=hosts, incidents=[acting], actions=[done])), [], settings, NOW + 3)
    assert decided(moves).kind is MOVE and moves.orders == ()


def test_ranks_save_without_the_approval_of_a_move_when_the_host_is_about_to_go() -> None:
    settings = PolicySettings(approve=(MOVE,))
    held = decide(view(hosts=leaving("preemption_notice", 30.0)), [], settings, NOW)
    assert held.wake_at == pytest.approx(NOW + 20.0), "twice the reserve before the deadline"
    seen = view(hosts=leaving("preemption_notice", 30.0), incidents=held.incidents)
    assert decided(decide(seen, [], settings, NOW + 20.0)).kind is DecisionKind.EMERGENCY_CHECKPOINT


def test_a_move_for_which_ranks_have_parked_comes_before_another_save() -> None:
    """Even if the other incident is older: one action at a time, and no second save of ranks that stand."""
    hosts = (
        host("a", job="job", drain=DrainView(DrainState.REQUESTED, NOW - 20, NOW + 300)),
        *leaving("drain_requested")[1:],
        host("d"),
    )
    other = incident(incident_id="inc-0", cause="drain_requested", host_id="a", generation=2, action_id="")
    older = msgspec.structs.replace(other, state=IncidentState.DECIDING)
    saved = incident(cause="drain_requested", generation=2, state=IncidentState.DECIDING)
    outcome = decide(view(hosts=hosts, incidents=[older, saved], actions=[ALL_SAVED]), [], SETTINGS, NOW)
    assert [(d.incident_id, d.kind) for d in outcome.decisions] == [("inc-0", DecisionKind.HOLD), ("inc-1", MOVE)]


def test_the_limit_of_actions_does_not_hold_a_move_for_which_all_ranks_have_parked() -> None:
    settings = PolicySettings(max_actions_per_hour=1)
    often = msgspec.structs.replace(JOB, acted_at=(NOW - 1,))
    notice = incident(cause="preemption_notice", generation=2, state=IncidentState.DECIDING)
    hosts = leaving("preemption_notice")
    seen = view(job=often, hosts=hosts, incidents=[notice], actions=[ALL_SAVED])
    assert decided(decide(seen, [], settings, NOW)).kind is MOVE
    assert decided(decide(view(job=often, hosts=hosts), [], settings, NOW)).rule == "act_no_more_often"


def parked(cause: str) -> dict[str, object]:
    """All ranks have saved and parked, since host b is to be left."""
    return {"incidents": [incident(cause=cause, generation=2, state=IncidentState.DECIDING)], "actions": [ALL_SAVED]}


@pytest.mark.parametrize("cause", ["preemption_notice", "drain_requested", "host_condition"])
@pytest.mark.parametrize(
    ("settings", "guard"),
    [
        (PolicySettings(approve=(MOVE, DecisionKind.RESUME)), "wait_for_approval"),
        (PolicySettings(dry_run=True), "only_say_it_in_a_dry_run"),
    ],
)
def test_ranks_train_on_while_a_guard_holds_the_move_for_which_they_have_parked(
    cause: str, settings: PolicySettings, guard: str
) -> None:
    decision = decided(decide(view(hosts=leaving(cause), **parked(cause)), [], settings, NOW))  # type: ignore[arg-type]
    assert (decision.kind, decision.rule) == (DecisionKind.RESUME, guard)
    assert decision.action is not None


def test_ranks_stay_parked_for_an_approval_on_a_host_that_is_about_to_go() -> None:
    seen = view(hosts=leaving("preemption_notice", 9.0), **parked("preemption_notice"))  # type: ignore[arg-type]
    assert decided(decide(seen, [], PolicySettings(approve=(MOVE,)), NOW)).kind is DecisionKind.HOLD


@pytest.mark.parametrize(
    "settings", [PolicySettings(approve=(DecisionKind.RESUME,)), PolicySettings(dry_run=True), SETTINGS]
)
def test_nothing_holds_back_the_release_of_parked_ranks(settings: PolicySettings) -> None:
    hosts = (HOSTS[0], host("b", job="job"), HOSTS[2])  # it need not be left any more
    window = Order(OrderKind.SILENCE, "a", NOW - 60, "new firmware", NOW + 600)
    seen = ordered(window, seen=view(hosts=hosts, **parked("drain_requested")))  # type: ignore[arg-type]
    assert decided(decide(seen, [], settings, NOW)).kind is DecisionKind.RESUME


def test_a_job_is_acted_on_only_so_often() -> None:
    settings = PolicySettings(max_actions_per_hour=3)
    often = msgspec.structs.replace(JOB, acted_at=(NOW - 1, NOW - 60, NOW - 600))
    decision = decided(by(settings, view(job=often, copies=SAVED)))
    assert (decision.rule, decision.evidence["actions"]) == ("act_no_more_often", 3)
    assert decision.evidence["wait_s"] == 3000.0, "then the oldest of the three is an hour old"
    before = msgspec.structs.replace(JOB, acted_at=(NOW - 1, NOW - 60, NOW - 3601))
    assert decided(by(settings, view(job=before, copies=SAVED))).kind is RESTART


# --- cordons ----------------------------------------------------------------------------------------------------------


def racks(count: int, each: int, *, cordoned: int = 0, since: float = NOW - 60) -> tuple[HostView, ...]:
    return tuple(
        host(
            f"h{n}",
            failure_domain=f"rack-{n // each}",
            state=HostState.CORDONED if n < cordoned else HostState.SPARE,
            since=since,
        )
        for n in range(count)
    )


@pytest.mark.parametrize(
    ("hosts", "percent", "allowed"),
    [
        (racks(2, 1), 20.0, 1),
        (racks(40, 1), 20.0, 8),
        (racks(40, 8), 20.0, 8),
        (racks(40, 4), 20.0, 4),
        (racks(40, 40), 5.0, 2),
    ],
    ids=["at least one", "each host a domain", "a share", "one rack's worth", "one large rack"],
)
def test_how_many_hosts_may_be_cordoned_within_an_hour(hosts: Sequence[HostView], percent: float, allowed: int) -> None:
    assert (
        blast_radius.limit(
            Fleet.of(host.failure_domain for host in hosts), PolicySettings(cordoned_percent_per_hour=percent)
        )
        == allowed
    )


def cordon_order(target: str) -> Order:
    return Order(OrderKind.CORDON, target, NOW - 1, "ECC errors")


def with_hosts(hosts: Sequence[HostView], *orders: Order) -> View:
    return View((), tuple(hosts), (), (), (), 7, 70, orders=orders)


def test_an_operator_cordons_a_host_and_it_stays_so_after_it_was_away() -> None:
    seen = with_hosts(racks(10, 5), cordon_order("h3"))
    outcome = decide(seen, [], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.kind, decision.rule) == (DecisionKind.CORDON, "cordon_on_request")
    (change,) = outcome.hosts
    assert (change.host_id, change.state) == ("h3", HostState.CORDONED)
    assert outcome.orders == (), "the order stands: a host that was silent returns as a spare"
    done = with_hosts((*racks(3, 3), host("h3", state=HostState.CORDONED)), cordon_order("h3"))
    assert decide(done, [], SETTINGS, NOW).empty


def test_an_order_beyond_the_limit_is_refused_with_numbers() -> None:
    seen = with_hosts(racks(10, 5, cordoned=2), cordon_order("h7"))
    outcome = decide(seen, [], SETTINGS, NOW)
    (change,) = outcome.orders
    assert change.state is OrderState.REFUSED and outcome.hosts == ()
    assert decided(outcome).rule == "refuse_to_cordon"
    later = with_hosts(racks(10, 5, cordoned=2, since=NOW - 4000), cordon_order("h7"))
    assert decided(decide(later, [], SETTINGS, NOW)).rule == "cordon_on_request"


def test_an_order_stays_in_force_and_is_no_new_one_after_the_host_was_away() -> None:
    back = host("h7", state=HostState.SPARE, since=NOW)
    seen = with_hosts((*racks(9, 3, cordoned=2), back), cordon_order("h7"))
    assert decided(decide(seen, [], SETTINGS, NOW)).rule == "cordon_on_request", "the limit is for new orders"
    assert "h7" not in [free.host_id for free in Round(seen, SETTINGS, NOW).free_hosts(JOB.spec)]


def test_in_a_small_cluster_the_limit_only_warns_an_operator() -> None:
    decision = decided(decide(with_hosts(racks(3, 1, cordoned=1), cordon_order("h2")), [], SETTINGS, NOW))
    assert decision.rule == "cordon_on_request"


def test_a_rules_move_goes_on_without_its_cordon_beyond_the_limit() -> None:
    case = Case(Round(with_hosts(racks(10, 5, cordoned=2)), SETTINGS, NOW), JOB, KILLED_INCIDENT)
    wanted = Verdict(DecisionKind.MIGRATE_TO_SPARE, "It moves.", cordons=("h7",))
    held = guard_rules.cordon_no_more_hosts(case, wanted)
    assert held is not None and held.cordons == () and "h7 is not cordoned: h0, h1 are" in held.reason
    fresh = Case(Round(with_hosts(racks(10, 5)), SETTINGS, NOW), JOB, KILLED_INCIDENT)
    assert guard_rules.cordon_no_more_hosts(fresh, wanted) is None


# --- maintenance windows ----------------------------------------------------------------------------------------------

SILENT_B = (HOSTS[0], host("b", job="job", state=HostState.SILENT, since=NOW - 20, last_report_at=NOW - 30), HOSTS[2])


def test_the_longest_of_a_hosts_windows_counts() -> None:
    windows = [
        Order(OrderKind.SILENCE, target, NOW - 60, until=NOW + after_s)
        for target, after_s in (("b", 60.0), ("domain:rack-b", 90.0), ("a", -1.0), ("domain:rack-c", 0.0))
    ]
    hosts = Round(ordered(*windows), SETTINGS, NOW).hosts
    assert [hosts[name].silenced_until for name in ("a", "b", "c")] == [0.0, NOW + 90.0, 0.0]


@pytest.mark.parametrize("target", ["b", "domain:rack-b"])
def test_the_silence_of_a_host_in_maintenance_is_no_incident(target: str) -> None:
    window = Order(OrderKind.SILENCE, target, NOW - 60, "new firmware", NOW + 600)
    outcome = decide(ordered(window, seen=view(hosts=SILENT_B, copies=SAVED)), [], SETTINGS, NOW)
    assert outcome.decisions == () and outcome.incidents == ()
    assert outcome.wake_at == NOW + 600


def test_what_its_absence_causes_elsewhere_waits_for_the_end_of_the_window() -> None:
    window = Order(OrderKind.SILENCE, "b", NOW - 60, "new firmware", NOW + 600)
    killed = msgspec.structs.replace(KILLED, rank=0)
    seen = ordered(window, seen=view(hosts=SILENT_B, copies=SAVED))
    decision = decided(decide(seen, [say(killed)], SETTINGS, NOW))
    assert decision.rule == "wait_for_the_end_of_maintenance"
    after = msgspec.structs.replace(seen, orders=())
    assert decided(decide(after, [say(killed)], SETTINGS, NOW)).kind is DecisionKind.MIGRATE_TO_SPARE


DOWN_A = host("a", job="job", state=HostState.DEGRADED, since=NOW - 20)


def test_in_a_window_ranks_do_not_park_for_a_move_and_parked_ones_do_not_wait_for_its_end() -> None:
    window = Order(OrderKind.SILENCE, "a", NOW - 60, "new firmware", NOW + 600)
    hosts = (DOWN_A, *leaving("drain_requested")[1:])
    held = decide(ordered(window, seen=view(hosts=hosts)), [], SETTINGS, NOW)
    assert decided(held).rule == "wait_for_the_end_of_maintenance"
    goes_on = ordered(window, seen=view(hosts=hosts, **parked("drain_requested")))  # type: ignore[arg-type]
    assert decided(decide(goes_on, [], SETTINGS, NOW)).kind is MOVE

    hosts = (DOWN_A, *leaving("preemption_notice", 30.0)[1:])
    noticed = ordered(window, seen=view(hosts=hosts))
    assert decide(noticed, [], SETTINGS, NOW).wake_at == pytest.approx(NOW + 20.0), "twice the reserve before the end"
    assert decided(decide(noticed, [], SETTINGS, NOW + 20.0)).kind is DecisionKind.EMERGENCY_CHECKPOINT


def test_a_host_that_is_left_for_its_maintenance_need_not_wait_for_its_end() -> None:
    window = Order(OrderKind.SILENCE, "b", NOW - 60, "new firmware", NOW + 600)
    seen = ordered(window, seen=view(hosts=leaving("drain_requested")))
    assert decided(decide(seen, [], SETTINGS, NOW)).kind is DecisionKind.EMERGENCY_CHECKPOINT


def test_a_window_that_is_over_is_forgotten_and_its_host_counts_again() -> None:
    window = Order(OrderKind.SILENCE, "b", NOW - 600, "new firmware", NOW - 1)
    outcome = decide(ordered(window, seen=view(hosts=SILENT_B, copies=SAVED)), [], SETTINGS, NOW)
    assert [change.state for change in outcome.orders] == [OrderState.OVER]
    assert decided(outcome).kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_condition_in_a_maintenance_window_makes_nobody_leave() -> None:
    broken = HostCondition("xid", Severity.CRITICAL, "Xid 79.", "probe kernel-log", NOW - 5)
    hosts = (HOSTS[0], host("b", job="job", conditions=(StandingCondition(broken),)), HOSTS[2])
    seen = view(hosts=hosts, copies=SAVED)
    assert decide(seen, [], SETTINGS, NOW).incidents != ()
    window = Order(OrderKind.SILENCE, "b", NOW - 60, "new firmware", NOW + 600)
    assert decide(ordered(window, seen=seen), [], SETTINGS, NOW).incidents == ()


# --- the history of hosts ---------------------------------------------------------------------------------------------


def failing(*days_ago: float, state: HostState = HostState.SPARE, job: str = "") -> HostView:
    moments = tuple(NOW - 86_400.0 * days for days in days_ago)
    return host("bad", state=state, job=job, failed_at=moments)


@pytest.mark.parametrize(
    ("bad", "orders", "is_kept_out"),
    [
        (failing(0.1, 1.0, 2.0), (), True),
        (failing(0.1, 1.0), (), False),
        (failing(0.1, 1.0, 8.0), (), False),
        (failing(0.1, 1.0, 2.0, state=HostState.HEALTHY, job="job"), (), False),
        (failing(0.1, 1.0, 2.0), (Order(OrderKind.CLEAR, "bad", NOW - 43_200.0),), False),
    ],
    ids=["three times", "twice", "long ago", "has ranks", "uncordoned since"],
)
def test_a_host_that_failed_three_times_stays_out(bad: HostView, orders: tuple[Order, ...], is_kept_out: bool) -> None:
    outcome = decide(with_hosts((*racks(9, 3), bad), *orders), [], SETTINGS, NOW)
    assert [(d.rule, d.kind) for d in outcome.decisions] == (
        [("keep_out_a_host_that_fails", DecisionKind.CORDON)] if is_kept_out else []
    )


def test_a_host_that_fails_is_the_last_choice_where_no_other_is_free() -> None:
    bad = failing(0.1, 1.0, 2.0)
    assert decide(with_hosts((bad,)), [], SETTINGS, NOW).decisions == ()
    busy = with_hosts((bad, host("h0", job="job")))
    assert decide(busy, [], SETTINGS, NOW).decisions == ()
    free = Round(with_hosts((bad, host("h0"))), SETTINGS, NOW).free_hosts(JOB.spec)
    assert [one.host_id for one in free] == ["h0", "bad"]


def test_few_hosts_that_fail_are_kept_out_and_given_back_where_no_other_is_left() -> None:
    worn = tuple(msgspec.structs.replace(failing(0.1, 1.0, 2.0), host_id=f"bad{n}") for n in range(4))
    first = decide(with_hosts((*worn, *racks(6, 3))), [], SETTINGS, NOW)
    assert [change.host_id for change in first.hosts] == ["bad0", "bad1"]
    kept = [
        msgspec.structs.replace(bad, state=HostState.CORDONED, since=NOW - 9_000, reason=change.reason)
        for bad, change in zip(worn, first.hosts, strict=False)
    ]
    later = decide(with_hosts((*kept, *worn[2:], *racks(6, 3))), [], SETTINGS, NOW)
    assert later.hosts == (), "no more in all than within an hour"
    left = decide(with_hosts(kept[:1]), [], SETTINGS, NOW)
    assert (decided(left).rule, left.hosts[0].state) == ("give_back_a_host_that_fails", HostState.SPARE)


def test_a_silence_that_ended_by_itself_is_no_failure() -> None:
    silent = incident(cause="host_silent", host_id="b", action_id="")
    assert failures_of_hosts([silent]) == {}
    acted = msgspec.structs.replace(silent, action_id="act-1")
    assert failures_of_hosts([acted]) == {"b": (acted.opened_at,)}


def test_an_old_note_that_a_host_was_cleared_is_forgotten() -> None:
    order = Order(OrderKind.CLEAR, "bad", NOW - 101)
    seen, settings = with_hosts(racks(3, 3), order), PolicySettings(host_failure_window_s=100.0)
    assert [change.state for change in decide(seen, [], settings, NOW).orders] == [OrderState.OVER]


def test_every_guard_has_nothing_to_say_about_an_ordinary_restart() -> None:
    case = Case(Round(view(copies=SAVED), SETTINGS, NOW), JOB, KILLED_INCIDENT)
    assert GENERATION.hosts and by(SETTINGS).decisions[0].kind is RESTART
    wanted = Verdict(RESTART, "It restarts.", plan=by(SETTINGS).decisions[0].action)
    for guard in (
        guard_rules.wait_for_the_end_of_maintenance,
        guard_rules.cordon_no_more_hosts,
        guard_rules.act_no_more_often,
        guard_rules.only_say_it_in_a_dry_run,
        guard_rules.wait_for_approval,
    ):
        assert guard(case, wanted) is None
