"""What the policy does before a restart goes further back than the newest recovery point that hosts told of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support.policy.checked import decide

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import Decision, DecisionKind, Incident, IncidentState
from services.controller.round.view import GenerationView, HostView, JobView, Outcome, PolicySettings, RankView, View

NOW = 10_000.0
SILENT_AT = NOW - 1.0
SETTINGS = PolicySettings()
SPEC = JobSpec(
    job="job", argv=("t.py",), workdir="/", nnodes=2, nproc_per_node=1, checkpoint=CheckpointSpec(every_steps=1)
)
GENERATION = GenerationView(
    generation=1,
    parent=None,
    lineage=(LineageEntry(1),),
    hosts=(HostRanks("a", "ip", "a:7", (0,)), HostRanks("b", "ip", "b:7", (1,))),
    peers={"a": ("b",), "b": ("a",)},
    started_at=NOW - 10.0 - 100.0,
    restore_step=None,
    restart_count=0,
    ranks=(RankView(0, "a", 49, Phase.STEP, NOW - 10), RankView(1, "b", 49, Phase.STEP, NOW - 10)),  # 2 s for a step
)
JOB = JobView(SPEC, JobState.RUNNING, NOW - 1000, False, GENERATION, newest_step=49, message="running on a, b")


def silent(name: str, *, job: str = "job", since: float = SILENT_AT) -> HostView:
    return host(name, state=HostState.SILENT, job=job, since=since, last_report_at=since - 9)


def host(name: str, *, state: HostState = HostState.HEALTHY, job: str = "", **more: float) -> HostView:
    facts = {"since": NOW - 500, "last_report_at": NOW - 0.1, **more}
    return HostView(
        host_id=name,
        state=state,
        address="ip",
        failure_domain="",
        engine_address=f"{name}:7",
        free_port=1,
        job=job,
        **facts,
    )


def held(step: int, on: str, *ranks: int, generation: int = 1) -> list[ShardCopy]:
    return [ShardCopy("job", generation, step, rank, Tier.MEMORY, on, 1, f"{step}.{rank}") for rank in ranks]


def job(*, never: bool = False, **more: object) -> JobView:
    spec = msgspec.structs.replace(SPEC, never_from_scratch=never)
    return msgspec.structs.replace(JOB, spec=spec, **more)


def look(
    *hosts: HostView,
    copies: Sequence[ShardCopy],
    of: JobView = JOB,
    incidents: Sequence[Incident] = (),
    now: float = NOW,
    settings: PolicySettings = SETTINGS,
) -> Outcome:
    return decide(View((of,), hosts, tuple(incidents), (), tuple(copies), 7, 70), [], settings, now)


ALL_SILENT = (silent("a"), silent("b"), host("c"), host("d"))
BOTH_HOLD = [*held(48, "a", 0, 1), *held(49, "a", 0), *held(49, "b", 1)]


def restarted(outcome: Outcome) -> Decision:
    (decision,) = [d for d in outcome.decisions if d.action is not None]
    assert decision.action is not None and decision.action.next is not None
    return decision


def test_hosts_that_hold_newer_steps_are_waited_for_as_long_as_to_do_those_again_would_take() -> None:
    first = look(*ALL_SILENT, copies=BOTH_HOLD)
    (decision,) = first.decisions
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "wait_for_newer_steps", None)
    assert decision.evidence["redo_rank_s"] == 200.0
    assert first.wake_at == NOW + 100.0
    (incident,) = first.incidents
    assert (incident.state, incident.hold_until) == (IncidentState.DECIDING, NOW + 100.0)

    fresh = [msgspec.structs.replace(h, last_report_at=NOW + 99) if not h.job else h for h in ALL_SILENT]
    assert not look(*fresh, copies=BOTH_HOLD, incidents=first.incidents, now=NOW + 99).decisions
    decision = restarted(look(*fresh, copies=BOTH_HOLD, incidents=first.incidents, now=NOW + 100))
    assert (decision.kind, decision.rule) == (DecisionKind.MIGRATE_TO_SPARE, "migrate_to_spare")
    assert (decision.evidence["steps_given_up"], decision.evidence["holders"]) == (50, "a,b")


def test_the_wait_grows_with_the_steps_and_has_an_end() -> None:
    old = [*held(9, "c", 0, 1), *BOTH_HOLD]
    assert look(*ALL_SILENT, copies=old).wake_at == NOW + 80.0, "step 9 is in reach"
    short = msgspec.structs.replace(SETTINGS, rollback_wait_s=30.0)
    assert look(*ALL_SILENT, copies=BOTH_HOLD, settings=short).wake_at == NOW + 30.0
    never = msgspec.structs.replace(SETTINGS, rollback_wait_s=0.0)
    assert restarted(look(*ALL_SILENT, copies=BOTH_HOLD, settings=never)).evidence["steps_given_up"] == 50


def test_a_few_steps_are_given_up_at_once_and_said() -> None:
    hosts = (host("a", job="job"), silent("b"), host("c"))
    assert restarted(look(*hosts, copies=BOTH_HOLD)).evidence["steps_given_up"] == 1
    nothing = restarted(look(*hosts, copies=[*BOTH_HOLD, *held(49, "a", 1)]))
    assert "steps_given_up" not in nothing.evidence, "the peer has all of it"


def test_the_wait_begins_when_the_last_holder_fell_silent() -> None:
    early = (silent("a", since=NOW - 60), silent("b", since=NOW - 20), host("c"), host("d"))
    first = look(*early, copies=BOTH_HOLD)
    assert first.wake_at == NOW + 100.0, "and the job had to restart"
    old = [msgspec.structs.replace(incident, opened_at=NOW - 60) for incident in first.incidents]
    assert look(*early, copies=BOTH_HOLD, incidents=old).wake_at == NOW + 80.0


def test_when_enough_holders_are_back_theirs_is_the_history() -> None:
    """After a moment in which the others may come back as well, and no rank has to start again."""
    first = look(*ALL_SILENT, copies=BOTH_HOLD)
    both = [*BOTH_HOLD, *held(49, "a", 1)]
    back = (host("a", job="job", since=NOW + 4, last_report_at=NOW + 5), silent("b"), host("c", last_report_at=NOW + 5))
    waits = look(*back, copies=both, incidents=first.incidents, now=NOW + 5)
    (decision,) = waits.decisions
    assert (decision.rule, waits.wake_at) == ("wait_for_the_others_that_return", NOW + 14)
    decision = restarted(look(*back, copies=both, incidents=waits.incidents, now=NOW + 14))
    assert decision.action is not None and decision.action.next is not None
    assert (decision.action.next.known_step, decision.action.stop_hosts) == (49, ("a",))
    assert "gives up" not in decision.reason


def test_ranks_that_train_on_when_all_hosts_are_back_do_not_start_again() -> None:
    first = look(*ALL_SILENT, copies=BOTH_HOLD)
    ranks = tuple(msgspec.structs.replace(rank, step=60, reported_at=NOW + 5) for rank in GENERATION.ranks)
    trains = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, ranks=ranks))
    back = [host(name, job="job", since=NOW + 4, last_report_at=NOW + 5) for name in "ab"]
    outcome = look(*back, host("c"), copies=BOTH_HOLD, of=trains, incidents=first.incidents, now=NOW + 5)
    assert not outcome.decisions
    assert outcome.incidents[0].state is IncidentState.RESOLVED


@pytest.mark.parametrize("now", [NOW, NOW + 100_000.0])
def test_a_job_that_must_not_begin_anew_waits_for_whoever_has_a_copy(now: float) -> None:
    fresh = [msgspec.structs.replace(h, last_report_at=now) if not h.job else h for h in ALL_SILENT]
    outcome = look(*fresh, copies=BOTH_HOLD, of=job(never=True), now=now)
    (decision,) = outcome.decisions
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "never_from_scratch", None)
    assert outcome.incidents[0].state is IncidentState.DECIDING
    assert outcome.wake_at == now + 1.0
    assert decision.evidence == {
        "newest_step": 49,
        "told_step": 49,
        "reach_step": -1,
        "steps_given_up": 50,
        "holders": "a,b",
        "step_s": 2.0,
        "redo_rank_s": 200.0,
    }


def test_a_job_that_must_not_begin_anew_may_go_back_and_may_restart_before_it_saved_anything() -> None:
    old = [*held(9, "c", 0, 1), *BOTH_HOLD]
    fresh = [msgspec.structs.replace(h, last_report_at=NOW + 80) if not h.job else h for h in ALL_SILENT]
    first = look(*ALL_SILENT, copies=old, of=job(never=True))
    assert restarted(look(*fresh, copies=old, of=job(never=True), incidents=first.incidents, now=NOW + 80))
    assert restarted(look(*ALL_SILENT, copies=[], of=job(never=True, newest_step=-1)))
    seldom = msgspec.structs.replace(SPEC, never_from_scratch=True, checkpoint=CheckpointSpec(every_steps=100))
    assert restarted(look(*ALL_SILENT, copies=[], of=msgspec.structs.replace(JOB, spec=seldom)))
    for newest_step, has_saved in ((98, False), (99, True)):  # step 99 is the hundredth
        of = msgspec.structs.replace(JOB, spec=seldom, newest_step=newest_step)
        (decision,) = look(*ALL_SILENT, copies=[], of=of).decisions
        assert (decision.rule == "never_from_scratch") is has_saved


def test_a_restart_without_any_copy_says_so_or_is_forbidden() -> None:
    """All hosts came back empty."""
    assert restarted(look(*ALL_SILENT, copies=[])).kind is DecisionKind.MIGRATE_TO_SPARE
    (decision,) = look(*ALL_SILENT, copies=[], of=job(never=True)).decisions
    assert "No host is known to hold one. To start over anyway: flyball stop job" in decision.reason


def test_a_generation_that_made_no_step_is_judged_by_what_the_job_took_for_a_step() -> None:
    empty = msgspec.structs.replace(
        GENERATION, generation=2, lineage=(LineageEntry(2),), parent_lineage=(LineageEntry(1),), ranks=()
    )
    stuck = msgspec.structs.replace(JOB, generation=empty, submitted_at=NOW - 150)
    assert look(*ALL_SILENT, copies=BOTH_HOLD, of=stuck).wake_at == NOW + 150.0
    further = msgspec.structs.replace(stuck, newest_step=74)  # in a generation whose steps do not count any more
    assert look(*ALL_SILENT, copies=BOTH_HOLD, of=further).wake_at == NOW + 100.0


def test_what_a_step_took_until_an_adoption_is_handed_on() -> None:
    """The database does not know how long the job had run before, and the next generation may make no step."""
    in_reach = held(49, "c", 0, 1)
    adopted = msgspec.structs.replace(GENERATION, started_at=NOW - 20, ran_before_s=200.0)
    young = msgspec.structs.replace(JOB, generation=adopted, submitted_at=NOW - 20)
    first = restarted(look(*ALL_SILENT, copies=in_reach, of=young)).action
    assert first is not None and first.next is not None and first.next.step_s == 4.2  # 210 s for 50 steps
    empty = msgspec.structs.replace(
        adopted, generation=2, parent_lineage=(LineageEntry(1),), ranks=(), ran_before_s=0.0, step_s=4.2
    )
    stuck = msgspec.structs.replace(young, generation=empty)
    assert look(*ALL_SILENT, copies=BOTH_HOLD, of=stuck).wake_at == NOW + 210.0
    second = restarted(look(*ALL_SILENT, copies=in_reach, of=stuck)).action
    assert second is not None and second.next is not None and second.next.step_s == 4.2


def test_what_an_adopted_generation_ran_is_for_the_steps_after_the_one_that_it_restored() -> None:
    """Swarm seed 30226: its host was lost before the new database had heard of a rank. The seconds since its start were
    taken for those of all steps of the job, and these given up as worth little."""
    copies = [msgspec.structs.replace(copy, generation=2) for copy in BOTH_HOLD]
    lineage = (LineageEntry(1, 46), LineageEntry(2))
    adopted = msgspec.structs.replace(
        GENERATION, generation=2, lineage=lineage, ranks=(), restore_step=46, started_at=NOW - 3, ran_before_s=6.0
    )
    young = msgspec.structs.replace(JOB, generation=adopted, submitted_at=NOW - 3)
    assert look(*ALL_SILENT, copies=copies, of=young).wake_at == NOW + 150.0  # 50 steps, of which 3 took 9 s
    young = msgspec.structs.replace(young, generation=msgspec.structs.replace(adopted, restore_step=49), newest_step=49)
    assert look(*ALL_SILENT, copies=copies, of=young).wake_at == NOW + 450.0, "as if it had made one"


def test_a_job_that_goes_on_after_it_had_ended_waits_for_newer_steps_too() -> None:
    again = msgspec.structs.replace(JOB, state=JobState.SUBMITTED, generation=None, before=GENERATION)
    hosts = [msgspec.structs.replace(h, job="") for h in ALL_SILENT]
    waits = look(*hosts, copies=BOTH_HOLD, of=again)
    assert (waits.decisions, waits.wake_at) == ((), SILENT_AT + 100.0)
    (change,) = waits.jobs
    assert change.state is JobState.SUBMITTED
    said = msgspec.structs.replace(again, message=change.message)
    assert not look(*hosts, copies=BOTH_HOLD, of=said).jobs, "and says so once"
    fresh = [msgspec.structs.replace(h, last_report_at=NOW + 99) if h.host_id in "cd" else h for h in hosts]
    (decision,) = look(*fresh, copies=BOTH_HOLD, of=again, now=NOW + 99).decisions
    assert decision.kind is DecisionKind.START_JOB
