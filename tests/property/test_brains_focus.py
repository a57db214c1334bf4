"""A round that looks at a part of everything decides the same about it as one that looks at all."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_brains_policy import NOW, SETTINGS, signals_of, views

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionState, GenerationPlan
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import HostReturned, Signal, WorkerExited
from services.controller.policy import decide
from services.controller.round.focus import Focus, focused, placed_hosts
from services.controller.round.view import (
    ActionView,
    DrainView,
    GenerationView,
    HostChange,
    HostView,
    JobView,
    Outcome,
    RankView,
    View,
)
from services.controller.turns import slices


def calm_job(name: str, hosts: Sequence[str]) -> tuple[JobView, list[HostView], list[ShardCopy]]:
    """A job of which there is nothing to say, and its hosts."""
    generation = GenerationView(
        generation=1,
        parent=None,
        lineage=(LineageEntry(1),),
        hosts=tuple(HostRanks(host, "ip", f"{host}:7", (rank,)) for rank, host in enumerate(hosts)),
        peers={},
        started_at=NOW - 1000,
        restore_step=None,
        restart_count=0,
        ranks=tuple(RankView(rank, host, 90, Phase.STEP, NOW - 0.5) for rank, host in enumerate(hosts)),
    )
    spec = JobSpec(job=name, argv=("t.py",), workdir="/", nnodes=len(hosts), nproc_per_node=1)
    view = JobView(spec, JobState.RUNNING, NOW - 3000, False, generation, newest_step=90)
    views = [
        HostView(host, HostState.HEALTHY, NOW - 3000, "ip", "r1", f"{host}:7", 1, NOW - 0.5, job=name) for host in hosts
    ]
    return view, views, [ShardCopy(name, 1, 90, r, Tier.MEMORY, host, 1, "d") for r, host in enumerate(hosts)]


@st.composite
def beside_calm_jobs(draw: st.DrawFn) -> View:
    """A job in any state beside two that are well, one of which may have something of the first on its hosts."""
    view: View = draw(views())
    before, hosts_before, copies_before = calm_job("before", ("0x", "0y"))
    after, hosts_after, copies_after = calm_job("well", ("x", "y"))
    kept = [ShardCopy("job", 1, 39, 1, Tier.PEER, "x", 1, "d")] if draw(st.booleans()) else []
    if draw(st.booleans()):
        hosts_after[1] = replace(hosts_after[1], stale_jobs={"job": 1}, stored_report_at=NOW - 0.5)
    return replace(
        view,
        jobs=(before, *view.jobs, after),
        hosts=(*hosts_before, *view.hosts, *hosts_after),
        copies=(*copies_before, *view.copies, *copies_after, *kept),
    )


@settings(max_examples=200, deadline=None)
@given(beside_calm_jobs(), signals_of)
def test_what_is_left_out_changes_no_decision(view: View, signals: list[Signal]) -> None:
    part = focused(view, Focus(frozenset({"job"}), signals))
    assert [job.spec.job for job in part.jobs] == ["job"]
    assert not {"0x", "0y"} & {host.host_id for host in part.hosts}
    assert decide(part, signals, SETTINGS, NOW) == decide(view, signals, SETTINGS, NOW)


def after(view: View, outcome: Outcome, signals: Sequence[Signal] = ()) -> View:
    """What a store shows when a round is stored, and nothing else has happened."""
    incidents = {incident.incident_id: incident for incident in (*view.incidents, *outcome.incidents)}
    open_incidents = tuple(incident for incident in incidents.values() if not incident.state.closed)
    decided = [decision for decision in outcome.decisions if decision.action is not None]
    begun = (
        ActionView(f"act-{of.decision_id[4:]}", of.decision_id, of.incident_id, of.action, ActionState.QUEUED, "", NOW)
        for of in decided
    )
    actions = [
        replace(action, state=ActionState.SUPERSEDED) if action.action_id in outcome.superseded_actions else action
        for action in (*view.actions, *begun)
    ]
    newest = {incident.action_id for incident in open_incidents}
    jobs = {job.spec.job: job for job in view.jobs}
    for decision in decided:
        if decision.action.next is not None:
            jobs[decision.job] = replace(jobs[decision.job], generation=granted(decision.action.next))
    for change in outcome.jobs:
        job, failures = jobs[change.job], [change.failure] if change.failure is not None else []
        jobs[change.job] = replace(
            job,
            state=change.state,
            message=change.message,
            failures=(*job.failures, *failures),
            ended_at=NOW if change.state.ended and not job.state.ended else job.ended_at,
        )
    for signal in signals:
        if isinstance(signal.body, WorkerExited) and signal.body.job in jobs:
            jobs[signal.body.job] = with_exit(jobs[signal.body.job], signal)
    placed = {host_id: job.spec.job for job in jobs.values() if not job.state.ended for host_id in placed_hosts([job])}
    changes = {change.host_id: change for change in outcome.hosts}
    return View(
        tuple(jobs.values()),
        tuple(
            replace(changed(host, changes.get(host.host_id)), job=placed.get(host.host_id, "")) for host in view.hosts
        ),
        open_incidents,
        tuple(action for action in actions if not action.state.ended or action.action_id in newest),
        view.copies,
        max([view.next_incident, *(int(name[4:]) + 1 for name in incidents)]),
        view.next_decision + len(outcome.decisions),
    )


def granted(plan: GenerationPlan) -> GenerationView:
    return GenerationView(
        plan.generation, plan.parent, plan.parent_lineage, plan.hosts, plan.peers, 0.0, None, plan.restart_count
    )


def with_exit(job: JobView, signal: Signal) -> JobView:
    """If it is about a rank that was there."""
    body, generation = signal.body, job.generation
    if generation is None or body.generation != generation.generation:
        return job
    ranks = tuple(
        replace(rank, exited=body, exited_at=signal.at)
        if rank.exited is None and (rank.rank, rank.host_id) == (body.rank, signal.source)
        else rank
        for rank in generation.ranks
    )
    return replace(job, generation=replace(generation, ranks=ranks))


def changed(host: HostView, change: HostChange | None) -> HostView:
    if change is None:
        return host
    refused = host.drain is not None and host.drain.state is DrainState.REQUESTED
    drain = (replace(host.drain, state=DrainState.REFUSED) if refused else None) if change.ended_drain else host.drain
    return replace(
        host,
        state=change.state,
        since=NOW if change.state is not host.state else host.since,
        reason=change.reason,
        preempt_deadline_at=host.preempt_deadline_at
        if change.preempt_deadline_at is None
        else change.preempt_deadline_at,
        drain=drain,
    )


def calm_cluster() -> View:
    """Two jobs that are well, and two free hosts."""
    job, hosts, copies = calm_job("job", ("a", "b"))
    well, hosts_of_well, copies_of_well = calm_job("well", ("x", "y"))
    free = [replace(hosts[0], host_id=name, engine_address=f"{name}:7", job="") for name in "cd"]
    return View((job, well), (*hosts, *free, *hosts_of_well), (), (), (*copies, *copies_of_well), 1, 1)


def happens(view: View, what: ActionState | DrainState | str | None) -> View:
    """What others than the controller store: actions end, operators have wishes, hosts have workers of old."""
    match what:
        case ActionState():
            ended = (a if a.state.ended else replace(a, state=what) for a in view.actions)
            return replace(view, actions=tuple(ended))
        case DrainState():
            wish = DrainView(what, NOW - 10, NOW + 290)
            return replace(view, hosts=(replace(view.hosts[0], drain=wish), *view.hosts[1:]))
        case "stop":
            return replace(view, jobs=(replace(view.jobs[0], stop_requested=True), *view.jobs[1:]))
    return view


def of_present(signal: Signal, view: View) -> Signal:
    """If it speaks of a generation: of that which is there."""
    generation = view.jobs[0].generation
    if generation is None or not hasattr(signal.body, "generation"):
        return signal
    return replace(signal, body=replace(signal.body, generation=generation.generation))


happenings = st.sampled_from(
    [None, None, ActionState.SUCCEEDED, ActionState.FAILED, "stop", DrainState.REQUESTED, DrainState.CANCELLED]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(happenings, signals_of), min_size=1, max_size=4))
def test_rounds_of_what_is_open_and_of_signals_miss_nothing_that_happens_to_jobs_that_were_well(
    rounds: list[tuple[ActionState | DrainState | str | None, list[Signal]]],
) -> None:
    view = calm_cluster()
    assert focused(view, Focus()).jobs == () and decide(view, (), SETTINGS, NOW).empty
    for what, drawn in rounds:
        view = happens(view, what)
        for signals in ([of_present(signal, view) for signal in drawn], []):
            outcome = decide(view, signals, SETTINGS, NOW)
            part = decide(focused(view, Focus(signals=signals)), signals, SETTINGS, NOW)
            assert replace(part, wake_at=0.0) == replace(outcome, wake_at=0.0)
            assert part.wake_at == 0.0 or 0.0 < outcome.wake_at <= part.wake_at, "others may ask for an earlier look"
            view = after(view, outcome, signals)


@settings(max_examples=50, deadline=None)
@given(beside_calm_jobs())
def test_turns_of_all_jobs_look_at_everything(view: View) -> None:
    turns = slices([(job.spec.job, job.spec.world_size) for job in view.jobs], 2)
    parts = [focused(view, Focus(turn)) for turn in turns]
    assert len(turns) == 3
    assert {job.spec.job for part in parts for job in part.jobs} == {"before", "job", "well"}
    assert {host.host_id for part in parts for host in part.hosts} == {host.host_id for host in view.hosts}
    assert {copy for part in parts for copy in part.copies} == set(view.copies)
    for part in parts:
        assert part.incidents == view.incidents and part.actions == view.actions


def test_what_a_signal_or_an_operator_speaks_of_is_looked_at() -> None:
    calm, hosts, copies = calm_job("calm", ("x", "y"))
    other, others, _ = calm_job("other", ("v", "w"))
    view = View((calm, other), (*hosts, *others), (), (), tuple(copies), 1, 1)

    def seen(focus: Focus, view: View = view) -> list[str]:
        part = focused(view, focus)
        return [job.spec.job for job in part.jobs] + [host.host_id for host in part.hosts]

    def told(source: str, body: object) -> Focus:
        return Focus(signals=(Signal(source, "i", 1, NOW, body),))

    assert seen(Focus()) == []
    assert seen(told("nobody", WorkerExited("calm", 1, 0, 7, 1, None, 5))) == ["calm", "x", "y"]
    assert seen(told("sensor.1", HostReturned("w", 3.0))) == ["other", "v", "w"]
    stopped = replace(view, jobs=(replace(calm, stop_requested=True), other))
    assert seen(Focus(), stopped) == ["calm", "x", "y"]
    wish = replace(others[0], drain=DrainView(DrainState.REQUESTED, NOW, NOW + 60))
    drained = replace(view, hosts=(*hosts, wish, others[1]))
    assert seen(Focus(), drained) == ["other", "v", "w"]


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_every_job_has_one_turn_and_turns_are_as_large_as_may_be(sizes: list[int], limit: int) -> None:
    jobs = [(f"job-{number}", size) for number, size in enumerate(sizes)]
    turns = slices(jobs, limit)
    assert sorted(name for turn in turns for name in turn) == sorted(name for name, _ in jobs)
    ranks = dict(jobs)
    for turn in turns:
        assert len(turn) == 1 or sum(ranks[name] for name in turn) <= limit
