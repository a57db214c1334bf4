"""What holds for every view and all signals: the policy is deterministic, idempotent, bounded, and leaves no incident
without a next step."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy.checked import decide

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase, WorkerError
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    DecisionKind,
    GenerationPlan,
    Incident,
    IncidentState,
)
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import (
    ConditionBegan,
    ConditionEnded,
    ConditionsStand,
    HostReturned,
    HostSilent,
    PreemptionNotice,
    RankStalled,
    Signal,
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
    PolicySettings,
    RankView,
    StandingCondition,
    View,
)

NOW = 10_000.0
HOSTS = ("a", "b", "c", "d")
SPEC = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, max_restarts=3)
SHRINKABLE = msgspec.structs.replace(SPEC, min_nodes=1)
SHRUNK = msgspec.structs.replace(SPEC, min_nodes=1, max_nodes=3)
SETTINGS = PolicySettings()

DRAINS = (
    DrainView(DrainState.REQUESTED, NOW - 10, NOW + 290, "new fans"),
    DrainView(DrainState.REQUESTED, NOW - 300, NOW - 1),
    DrainView(DrainState.REFUSED, NOW - 300, NOW - 1),
    DrainView(DrainState.CANCELLED, NOW - 1, NOW - 1),
)

CONDITIONS = st.builds(
    HostCondition,
    kind=st.sampled_from(["xid", "thermal"]),
    severity=st.sampled_from(list(Severity)),
    message=st.just("It is hot."),
    source=st.just("probe gpu"),
    since=st.sampled_from([NOW - 100, NOW - 1]),
    until=st.sampled_from([0.0, 0.0, NOW - 0.5, NOW + 60]),
)
standing = st.lists(st.builds(StandingCondition, CONDITIONS, st.sampled_from([False, False, True])), max_size=2).map(
    lambda found: tuple({one.condition.key: one for one in found}.values())
)
ages = st.sampled_from([0.1, 1.0, 5.0, 100.0, 1000.0])
hosts_of = st.tuples(
    *(
        st.builds(
            HostView,
            host_id=st.just(name),
            state=st.sampled_from(list(HostState)),
            since=ages.map(lambda age: NOW - age),
            address=st.just("ip"),
            failure_domain=st.sampled_from(["r1", "r2"]),
            engine_address=st.just(f"{name}:7"),
            free_port=st.just(1),
            last_report_at=ages.map(lambda age: NOW - age),
            preempt_deadline_at=st.sampled_from([0.0, 0.0, 0.0, NOW - 5, NOW + 3, NOW + 30]),
            job=st.just("job" if name in "ab" else ""),
            stale_jobs=st.sampled_from([{}, {}, {"job": 1}]),
            drain=st.sampled_from([None, None, None, *DRAINS]),
            conditions=st.one_of(st.just(()), standing),
        )
        for name in HOSTS
    )
)
errors = st.sampled_from([None, WorkerError("ValueError", "boom"), WorkerError("E", "Connection reset by peer")])
exits = st.builds(
    WorkerExited,
    job=st.sampled_from(["job", "other"]),
    generation=st.integers(1, 3),
    rank=st.integers(0, 1),
    pid=st.just(7),
    exit_code=st.sampled_from([0, 1, 23, None]),
    signal_number=st.sampled_from([None, 9]),
    last_step=st.integers(-1, 50),
    error=errors,
    expected=st.booleans(),
)
ranks = st.lists(
    st.builds(
        RankView,
        rank=st.integers(0, 1),
        host_id=st.sampled_from(["a", "b"]),
        step=st.integers(-1, 60),
        phase=st.sampled_from(list(Phase)),
        reported_at=ages.map(lambda age: NOW - age),
        exited=st.one_of(st.none(), exits),
        exited_at=st.just(NOW - 1),
    ),
    max_size=2,
    unique_by=lambda rank: rank.rank,
).map(lambda drawn: tuple(sorted(drawn, key=lambda rank: rank.rank)))
PARTS = (HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,)))
generations = st.builds(
    GenerationView,
    generation=st.just(2),
    parent=st.just(1),
    lineage=st.just((LineageEntry(1, 40), LineageEntry(2))),
    hosts=st.just(PARTS),
    peers=st.just({}),
    started_at=st.sampled_from([0.0, NOW - 3, NOW - 400]),
    restore_step=st.sampled_from([None, 40]),
    restart_count=st.integers(0, 3),
    ranks=ranks,
    restarts_used=st.integers(-1, 3),
    furthest_step=st.sampled_from([-1, 40, 55]),
)
jobs = st.builds(
    JobView,
    spec=st.sampled_from([SPEC, SHRINKABLE, SHRUNK]),
    state=st.just(JobState.RUNNING),
    submitted_at=st.just(NOW - 2000),
    stop_requested=st.sampled_from([False, False, False, True]),
    generation=generations,
    newest_step=st.just(50),
)
signals_of = st.lists(
    st.builds(
        Signal,
        source=st.sampled_from([*HOSTS, "sensor.1"]),
        incarnation=st.just("i"),
        seq=st.integers(1, 9),
        at=ages.map(lambda age: NOW - age),
        body=st.one_of(
            exits,
            st.builds(HostSilent, st.sampled_from(HOSTS), st.just(3.0), st.just(2.0), st.just(())),
            st.builds(HostReturned, st.sampled_from(HOSTS), st.just(3.0)),
            st.builds(ConditionBegan, CONDITIONS),
            st.builds(ConditionEnded, st.just("probe gpu"), st.sampled_from(["xid", "thermal"])),
            st.builds(ConditionsStand, st.just(("probe gpu",)), st.just(())),
            st.builds(PreemptionNotice, st.sampled_from([NOW + 30, NOW + 4, NOW - 1, 0.0]), st.just("t")),
            st.builds(
                RankStalled,
                st.just("job"),
                st.integers(1, 3),
                st.sampled_from([(0,), (0, 1)]),
                st.just(Phase.STEP),
                st.integers(-1, 60),
                st.just(3.0),
                st.just(2.0),
            ),
            st.builds(WorkerStartFailed, st.just("job"), st.integers(1, 3), st.just(0), st.just("no script")),
        ),
    ),
    max_size=4,
)
copies_of = st.lists(
    st.builds(
        ShardCopy, st.just("job"), st.just(1), st.integers(38, 40), st.integers(0, 1), st.just(Tier.MEMORY),
        st.sampled_from(HOSTS), st.just(1), st.just("d"),
    ),
    max_size=6,
)  # fmt: skip
NOTICES = ("preemption_notice", "host_condition", "drain_requested", "room_to_grow", "checkpoint_requested")
causes = st.sampled_from(
    ["worker_killed", "worker_exception", "rank_stalled", "host_silent", "connection_lost", "restore_failed"]
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """A running job with hosts in any state, and perhaps an incident anywhere in its life."""
    incidents: list[Incident] = []
    actions: list[ActionView] = []
    shape = draw(st.sampled_from(["none", "failure", "notice", "both"]))
    if shape in ("failure", "both"):
        incidents.append(draw(_incident("inc-1", draw(causes), actions)))
    if shape in ("notice", "both"):
        notice = draw(st.sampled_from(NOTICES))
        incidents.append(draw(_incident("inc-2", notice, actions)))
    return View((draw(jobs),), draw(hosts_of), tuple(incidents), tuple(actions), tuple(draw(copies_of)), 3, 30)


@st.composite
def _incident(draw: st.DrawFn, incident_id: str, cause: str, actions: list[ActionView]) -> Incident:
    state = draw(st.sampled_from([IncidentState.DECIDING, IncidentState.ACTING, IncidentState.VERIFYING]))
    number = f"1{incident_id[-1]}"
    made = draw(st.integers(0, 8)) if state is IncidentState.DECIDING else draw(st.integers(1, 8))
    if made:
        saves = cause in NOTICES and draw(st.booleans())
        following = GenerationPlan("job", 2, 1, PARTS, {}, (LineageEntry(1),), 1)
        plan = ActionPlan(
            DecisionKind.EMERGENCY_CHECKPOINT if saves else DecisionKind.RESTART_IN_PLACE,
            "job",
            SPEC,
            generation=1,
            stop_hosts=draw(st.sampled_from([("a", "b"), ("a", "c")])),
            next=None if saves else following,
        )
        if state is IncidentState.ACTING:
            states = list(ActionState)
        elif state is IncidentState.VERIFYING:
            states = [ActionState.SUCCEEDED]
        else:
            states = [s for s in ActionState if s.ended]
        actions.append(
            ActionView(
                action_id=f"act-{number}",
                decision_id=f"dec-{number}",
                incident_id=incident_id,
                plan=plan,
                state=draw(st.sampled_from(states)),
                phase=draw(st.sampled_from(["", "stop", "start"])),
                started_at=NOW - 5,
                positions=draw(st.sampled_from([{}, {"0": 44}, {"0": 44, "1": 43}])),
                restore_step=draw(st.sampled_from([None, 40])),
            )
        )
    return Incident(
        incident_id=incident_id,
        job="job",
        host_id=draw(st.sampled_from(["a", "b", "c"])),
        cause=cause,
        state=state,
        opened_at=NOW - 20,
        since=draw(ages.map(lambda age: NOW - age)),
        message="Something happened.",
        generation=draw(st.integers(1, 2)),
        failed_step=draw(st.integers(-1, 60)),
        action_id=f"act-{number}" if made else "",
        decisions_made=made,
    )


@settings(max_examples=100, deadline=None)
@given(views(), st.lists(st.tuples(st.sampled_from(HOSTS), CONDITIONS), max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_simultaneous_conditions_changes_nothing(
    view: View, began: list[tuple[str, HostCondition]], random: Random
) -> None:
    first = {(host, condition.key): condition for host, condition in began}  # one of each kind per host
    signals = [Signal(host, "i", n, NOW, ConditionBegan(c)) for n, ((host, _), c) in enumerate(first.items(), 1)]
    shuffled = random.sample(signals, len(signals))
    one, other = decide(view, signals, SETTINGS, NOW), decide(view, shuffled, SETTINGS, NOW)
    assert (one.decisions, one.incidents, one.hosts, one.wake_at) == (
        other.decisions,
        other.incidents,
        other.hosts,
        other.wake_at,
    )
    assert set(map(msgspec.json.encode, one.conditions)) == set(map(msgspec.json.encode, other.conditions))


@settings(max_examples=150, deadline=None)
@given(views(), signals_of)
def test_every_round(view: View, signals: list[Signal]) -> None:
    outcome = decide(view, signals, SETTINGS, NOW)
    assert outcome == decide(view, signals, SETTINGS, NOW)
    assert outcome == decide(msgspec.convert(msgspec.to_builtins(view), View), signals, SETTINGS, NOW)

    acting = Counter(d.job for d in outcome.decisions if d.action and d.action.kind is not DecisionKind.CORDON)
    assert all(count == 1 for count in acting.values()), "two actions for one job in one round"
    numbers = [int(d.decision_id.removeprefix("dec-")) for d in outcome.decisions]
    assert numbers == list(range(30, 30 + len(numbers)))
    assert outcome.wake_at == 0.0 or outcome.wake_at >= NOW

    before = {incident.incident_id: incident for incident in view.incidents}
    after = before | {incident.incident_id: incident for incident in outcome.incidents}
    for decision in outcome.decisions:
        assert decision.incident_id == "" or decision.incident_id in after
        plan = decision.action
        if plan is None:
            continue
        assert not set(plan.stop_hosts) & set(plan.unreachable_hosts)
        states = {h.host_id: h.state for h in view.hosts} | {c.host_id: c.state for c in outcome.hosts}
        assert all(states[host] is not HostState.SILENT for host in plan.stop_hosts)
        if plan.next is not None:
            placed = [part.host_id for part in plan.next.hosts]
            spec = view.jobs[0].spec
            assert len(set(placed)) == len(placed) == plan.spec.nnodes
            assert spec.fewest_nnodes <= len(placed) <= spec.asked_nnodes == plan.spec.asked_nnodes
            change = {DecisionKind.SHRINK: len(placed) < SPEC.nnodes, DecisionKind.GROW: len(placed) > SPEC.nnodes}
            assert change.get(plan.kind, len(placed) == SPEC.nnodes)
            assert all(states[host] is not HostState.SILENT for host in placed)
            assert plan.next.generation == 3
            assert [part.ranks for part in plan.next.hosts] == [(number,) for number in range(len(placed))]
    for change in outcome.jobs:
        if change.state.ended:
            assert all(incident.state.closed for incident in after.values())
            return
    for incident in after.values():
        if incident.state is IncidentState.DECIDING:
            # It holds for something, and somebody will look again, or the end of another incident is news.
            assert incident.holding_for, incident
            first = after.get(incident.holding_for.removesuffix(" to be over"))
            assert outcome.wake_at > NOW or (first is not None and not first.state.closed), incident
        if incident.state.closed:
            assert incident.resolved_at == NOW


def _with_conditions(view: View, outcome: Outcome) -> list[HostView]:
    """The hosts after a round has changed their conditions."""
    standing = {(host.host_id, one.condition.key): one for host in view.hosts for one in host.conditions}
    for change in outcome.conditions:
        key = (change.host_id, change.condition.key)
        if change.has_ended:
            del standing[key]
        else:
            standing[key] = StandingCondition(change.condition, change.is_overruled)
    return [
        msgspec.structs.replace(
            host, conditions=tuple(one for (host_id, _), one in sorted(standing.items()) if host_id == host.host_id)
        )
        for host in view.hosts
    ]


@settings(max_examples=80, deadline=None)
@given(views(), signals_of)
def test_a_second_round_adds_nothing_to_a_hold(view: View, signals: list[Signal]) -> None:
    outcome = decide(view, signals, SETTINGS, NOW)
    if any(d.action for d in outcome.decisions) or outcome.superseded_actions:
        return  # what follows depends on the hosts' answers
    changed = {incident.incident_id: incident for incident in outcome.incidents}
    hosts = {change.host_id: change for change in outcome.hosts}
    later = msgspec.structs.replace(
        view,
        incidents=tuple(
            incident
            for incident in ({i.incident_id: i for i in view.incidents} | changed).values()
            if not incident.state.closed
        ),
        hosts=tuple(
            msgspec.structs.replace(
                host,
                state=hosts[host.host_id].state,
                since=NOW if hosts[host.host_id].state is not host.state else host.since,
                reason=hosts[host.host_id].reason,
                preempt_deadline_at=host.preempt_deadline_at
                if (deadline := hosts[host.host_id].preempt_deadline_at) is None
                else deadline,
            )
            if host.host_id in hosts
            else host
            for host in _with_conditions(view, outcome)
        ),
        next_incident=view.next_incident + len(set(changed) - {i.incident_id for i in view.incidents}),
        next_decision=view.next_decision + len(outcome.decisions),
    )
    again = decide(later, [], SETTINGS, NOW)
    repeated = [
        d
        for d in again.decisions
        if (d.incident_id, d.reason) in {(o.incident_id, o.reason) for o in outcome.decisions}
    ]
    assert repeated == []


one_each = st.tuples(
    st.lists(st.builds(msgspec.structs.replace, exits, rank=st.just(0), generation=st.just(2)), max_size=1),
    st.lists(st.builds(msgspec.structs.replace, exits, rank=st.just(1), generation=st.just(2)), max_size=1),
    st.lists(st.builds(HostSilent, st.just("a"), st.just(3.0), st.just(2.0), st.just(())), max_size=1),
    st.lists(st.builds(PreemptionNotice, st.sampled_from([NOW + 30, NOW + 4]), st.just("t")), max_size=1),
).map(lambda parts: [body for part in parts for body in part])


@settings(max_examples=80, deadline=None)
@given(views(), one_each, st.randoms(use_true_random=False))
def test_the_order_of_simultaneous_signals_changes_no_decision(
    view: View, bodies: list[object], random: object
) -> None:
    """One signal about each rank and host, all of the same moment."""
    sources = {0: "a", 1: "b"}
    signals = [
        Signal(sources.get(getattr(body, "rank", 2), "c"), "i", number, NOW - 0.1, body)  # type: ignore[arg-type]
        for number, body in enumerate(bodies)
    ]
    shuffled = list(signals)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(view, signals, SETTINGS, NOW) == decide(view, shuffled, SETTINGS, NOW)
