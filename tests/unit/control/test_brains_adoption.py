"""What is taken over from hosts that are ahead of the database, and what is waited for. Pure."""

from __future__ import annotations

import msgspec
import pytest
from support.jobs.placements import make_placement
from support.policy.checked import decide
from support.policy.views import action, host

from flyball.contracts.checkpoints import LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import ActionState, DecisionKind, Incident, IncidentState
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed
from services.actuator.rules.host_parts import host_parts
from services.controller.round.view import GenerationView, JobView, Outcome, PolicySettings, ReportedStanding, View
from services.controller.updates.adoption import OTHER_CLUSTER_S, plan_of
from services.controller.updates.held_jobs import NOT_ADOPTED
from services.controller.updates.standing_words import GATHER_S, HEARD_WITHIN_S, WHOLE_WITHIN_S, merged
from services.rules.grant_seals import whole_digest

NOW = 1000.0
SPEC = JobSpec("job", ("train.py",), "/work", nnodes=6)
WHOLE = make_placement(
    {f"h{n}": (n,) for n in range(6)},
    generation=5,
    peers={f"h{n}": (f"h{(n + 1) % 6}",) for n in range(6)},
    lineage=(LineageEntry(2, 40), LineageEntry(5, None)),
    run="20261123-180000-000",
)

SEAL = GrantSeal(run=WHOLE.run, generation=5, epoch=9, part="p", whole=whole_digest(WHOLE), mac="verified by the store")


def told(
    *hosts: int, cluster: str = "mine", unanswered_s: float = 100.0, alive: bool = True
) -> tuple[ReportedStanding, ...]:
    parts = host_parts(WHOLE)
    return tuple(
        ReportedStanding(
            HostStanding(
                host_id=f"h{n}",
                incarnation="i",
                at=NOW,
                obeyed=LastObeyed(cluster, 9, "act-abcd-31.start.h.1"),
                unanswered_s=unanswered_s,
                jobs=(HeldJob(SPEC, parts[f"h{n}"], Fence(9, 5), (n,) if alive else (), seal=SEAL),),
            ),
            NOW,
            NOW,
            sealed=("job",),
        )
        for n in hosts
    )


def decided(standings: tuple[ReportedStanding, ...], after_s: float) -> Outcome:
    view = View((), (), (), (), (), next_incident=1, next_decision=1, cluster="mine", standings=standings)
    return decide(view, [], PolicySettings(), NOW + after_s)


def test_the_parts_of_all_hosts_are_the_whole_placement() -> None:
    assert merged(list(host_parts(WHOLE).values())) == WHOLE


@pytest.mark.parametrize("hosts", [range(6), (0,), (0, 3), (1, 3, 5)])
def test_a_job_is_adopted_whose_places_are_known(hosts: tuple[int, ...]) -> None:
    """Rank 0's host knows all; others know those that they have to do with. Those that nobody has heard may follow."""
    assert decided(told(*hosts), GATHER_S / 2).adoption is None
    outcome = decided(told(*hosts), GATHER_S if len(hosts) == 6 else HEARD_WITHIN_S)
    assert outcome.adoption is not None
    assert (outcome.adoption.epoch_floor, outcome.adoption.decision_floor) == (9, 31)
    [job] = outcome.adoption.jobs
    assert (job.plan.generation, job.plan.hosts, job.placement.lineage) == (5, WHOLE.hosts, WHOLE.lineage)


def test_what_nobody_tells_whole_stays_an_incident_and_its_hosts_unsettled() -> None:
    assert NOT_ADOPTED not in {i.cause for i in decided(told(1), WHOLE_WITHIN_S / 2).incidents}
    outcome = decided(told(1), WHOLE_WITHIN_S)
    assert outcome.adoption is None
    assert {i.cause for i in outcome.incidents if not i.state.closed} == {NOT_ADOPTED, "database_older"}
    assert "Next step" in next(i.message for i in outcome.incidents if i.cause == NOT_ADOPTED)
    gone = decided(told(1, alive=False), WHOLE_WITHIN_S)
    assert gone.adoption is not None
    assert gone.adoption.jobs == ()


def test_a_host_is_taken_over_from_another_cluster_only_when_that_one_is_silent() -> None:
    standings = told(0, cluster="other", unanswered_s=1.0)
    assert decided(standings, GATHER_S).adoption is None
    assert decided(standings, OTHER_CLUSTER_S - 1.1).adoption is None
    assert decided(standings, OTHER_CLUSTER_S - 1.0).adoption is not None


def test_a_job_that_ended_is_not_adopted() -> None:
    [one], [other] = told(0, alive=False), told(1)
    ended = msgspec.structs.replace(other.standing, jobs=(), ended={"job": 6})
    outcome = decided(
        (one, msgspec.structs.replace(other, standing=ended, sealed=(), ended={"job": (WHOLE.run, 5)})), GATHER_S
    )
    assert outcome.adoption is not None
    assert outcome.adoption.jobs == ()


# --- what stays, and what is over ------------------------------------------------------------------------------------


def known(generation: int | None, *, state: JobState = JobState.RUNNING, started_at: float = NOW - 50) -> JobView:
    """The job as this database knows it."""
    view = None
    if generation is not None:
        view = GenerationView(
            generation=generation,
            parent=None,
            lineage=(LineageEntry(generation),),
            hosts=WHOLE.hosts,
            peers={},
            started_at=started_at,
            restore_step=None,
            restart_count=0,
        )
    return JobView(SPEC, state, NOW - 100, False, view)


def looked(
    standings: tuple[ReportedStanding, ...],
    *,
    after_s: float = GATHER_S,
    jobs: tuple[JobView, ...] = (),
    incidents: tuple[Incident, ...] = (),
) -> Outcome:
    view = View(jobs, (), incidents, (), (), next_incident=5, next_decision=1, cluster="mine", standings=standings)
    return decide(view, [], PolicySettings(), NOW + after_s)


def unadopted(job: str = "job", generation: int = 5, cause: str = NOT_ADOPTED) -> Incident:
    return Incident("inc-1", job, "", cause, IncidentState.DECIDING, NOW, NOW, "It runs unsupervised.", generation)


def closed(outcome: Outcome) -> set[str]:
    return {i.incident_id for i in outcome.incidents if i.state.closed}


def test_a_job_that_is_not_adopted_has_one_incident() -> None:
    first = looked(told(1), after_s=WHOLE_WITHIN_S)
    (opened,) = [i for i in first.incidents if i.cause == NOT_ADOPTED]
    assert (opened.job, opened.generation, opened.host_id, opened.observed_at) == ("job", 5, "", NOW + WHOLE_WITHIN_S)
    assert first.wake_at == NOW + WHOLE_WITHIN_S + GATHER_S
    assert opened.incident_id in {d.incident_id for d in first.decisions if d.kind is DecisionKind.HOLD}
    again = looked(told(1), after_s=WHOLE_WITHIN_S, incidents=first.incidents)
    assert again.incidents == () and again.decisions == () and again.wake_at == first.wake_at
    others = looked(told(1), after_s=WHOLE_WITHIN_S, incidents=(unadopted("other"), unadopted(cause="worker_killed")))
    assert NOT_ADOPTED in {i.cause for i in others.incidents if i.job == "job"}, "those are not about it"


@pytest.mark.parametrize(
    ("jobs", "standings", "ends"),
    [
        ((), told(1), False),
        ((known(4),), told(1), False),
        ((known(5),), told(1), True),  # it is supervised
        ((known(None, state=JobState.SUBMITTED),), told(1), False),
        ((), told(1, alive=False), True),  # nobody runs it
    ],
)
def test_it_is_over_when_the_job_is_supervised_or_runs_no_more(
    jobs: tuple[JobView, ...], standings: tuple[ReportedStanding, ...], ends: bool
) -> None:
    outcome = looked(standings, after_s=WHOLE_WITHIN_S - 1, jobs=jobs, incidents=(unadopted(),))
    assert ("inc-1" in closed(outcome)) is ends


def test_without_standings_what_was_open_about_the_database_is_over() -> None:
    older, new = unadopted("", -1, "database_older"), unadopted("", -1, "database_new")
    for incident in (older, new):
        assert closed(looked((), incidents=(incident,))) == {"inc-1"}
    assert looked(()).incidents == ()


def test_the_message_says_whose_commands_the_hosts_obeyed() -> None:
    (older,) = looked(told(0), after_s=0.0).incidents
    (new,) = looked(told(0, cluster="other"), after_s=0.0).incidents
    assert (older.cause, new.cause) == ("database_older", "database_new")
    assert "cluster" not in older.message
    assert (older.job, older.host_id, older.generation, older.observed_at) == ("", "", -1, NOW)


def test_it_says_once_what_it_waits_for_and_looks_again_each_second() -> None:
    first = looked(told(0), after_s=0.5)
    (held,) = first.incidents
    assert (held.hold_until, first.wake_at) == (NOW + GATHER_S, NOW + 1.5)
    assert [d.kind for d in first.decisions] == [DecisionKind.HOLD]
    assert not looked(told(0), after_s=0.6, incidents=first.incidents).decisions
    assert looked(told(0), after_s=GATHER_S - 0.1).wake_at == NOW + GATHER_S
    waits = looked(told(1), after_s=GATHER_S)
    assert waits.incidents[0].hold_until == NOW + WHOLE_WITHIN_S
    elsewhere = looked(told(0, cluster="other", unanswered_s=1.0), after_s=GATHER_S)
    assert elsewhere.incidents[0].hold_until == NOW + OTHER_CLUSTER_S - 1.0


@pytest.mark.parametrize(
    ("job", "is_news"),
    [
        (known(4), True),
        (known(5), False),
        (known(6), False),
        (known(5, started_at=0.0), True),  # its start is not on record
        (known(5, state=JobState.STOPPED), False),
        (known(4, state=JobState.STOPPED), True),
        (known(None, state=JobState.SUBMITTED), True),
    ],
)
def test_only_what_the_database_does_not_know_is_taken_over(job: JobView, is_news: bool) -> None:
    outcome = looked(told(0), jobs=(job,), after_s=HEARD_WITHIN_S)
    assert outcome.adoption is not None
    assert [adopted.plan.generation for adopted in outcome.adoption.jobs] == ([5] if is_news else [])


def test_another_generation_of_the_same_number_is_news() -> None:
    mine = known(5)
    assert mine.generation is not None
    moved = tuple(msgspec.structs.replace(part, ranks=(5 - part.ranks[0],)) for part in WHOLE.hosts)
    job = msgspec.structs.replace(mine, generation=msgspec.structs.replace(mine.generation, hosts=moved))
    outcome = looked(told(0), jobs=(job,), after_s=HEARD_WITHIN_S)
    assert outcome.adoption is not None and len(outcome.adoption.jobs) == 1


def test_a_host_that_holds_a_job_without_a_part_in_it_says_nothing_of_that_job() -> None:
    [one] = told(0)
    stranger = msgspec.structs.replace(one, standing=msgspec.structs.replace(one.standing, host_id="stranger"))
    for jobs in ((known(4),), ()):
        outcome = looked((stranger,), jobs=jobs, after_s=WHOLE_WITHIN_S)
        assert outcome.adoption is not None and outcome.adoption.jobs == ()
        assert NOT_ADOPTED not in {i.cause for i in outcome.incidents}


def test_the_decision_and_the_grant_have_what_the_hosts_reported() -> None:
    outcome = looked(told(*range(6)), jobs=(known(4),))
    adopt, floor = outcome.decisions
    told_by = "h0, h1, h2, h3, h4, h5"
    assert adopt.evidence == {"job": "job", "generation": 5, "ranks": 6, "alive": 6, "sealed": True, "told_by": told_by}
    assert floor.evidence == {"epoch": 9, "number": 31, "hosts": 6, "jobs": 1}
    assert {adopt.kind, floor.kind} == {DecisionKind.ADOPT}
    assert outcome.adoption is not None
    [job] = outcome.adoption.jobs
    assert job.decision_id == adopt.decision_id
    plan = job.plan
    assert (plan.job, plan.parent, plan.peers, plan.master_port, plan.run) == (
        "job",
        2,
        WHOLE.peers,
        WHOLE.master_port,
        WHOLE.run,
    )
    assert (plan.restart_count, plan.known_step, plan.furthest_step, plan.ran_before_s) == (0, -1, -1, 0.0)


def test_the_whole_of_restored_parts_has_all_sources_and_the_grant_its_step() -> None:
    def source(rank: int) -> ShardSource:
        return ShardSource(rank, 2, Tier.MEMORY, f"h{rank}", "")

    parts = [
        msgspec.structs.replace(
            WHOLE,
            hosts=WHOLE.hosts[n : n + 1],
            peers={f"h{n}": ()},
            restore=RestorePlan(40, {str(n): (source(n),)}),
            restart_count=3,
        )
        for n in (1, 0)
    ]
    whole = merged(parts)
    assert whole.restore == RestorePlan(40, {"1": (source(1),), "0": (source(0),)})
    assert [part.ranks for part in whole.hosts] == [(0,), (1,)]
    assert (set(whole.peers), whole.restart_count) == ({"h0", "h1"}, 3)
    plan = plan_of(whole, known_step=40, ran_s=12.0)
    assert (plan.known_step, plan.furthest_step, plan.ran_before_s, plan.restart_count) == (40, 40, 12.0, 3)
    first = msgspec.structs.replace(whole, lineage=(LineageEntry(5),))
    assert plan_of(first, known_step=-1, ran_s=0.0).parent is None


@pytest.mark.parametrize(("ended", "stops"), [(4, False), (5, True), (6, True)])
def test_the_newer_of_an_end_and_a_start_counts(ended: int, stops: bool) -> None:
    [held], [other] = told(0, alive=False), told(1)
    end = msgspec.structs.replace(
        other,
        standing=msgspec.structs.replace(other.standing, jobs=(), ended={"job": ended}),
        sealed=(),
        ended={"job": (WHOLE.run, ended)},
    )
    outcome = looked((held, end), jobs=(known(5, started_at=NOW),))
    assert [change.state for change in outcome.jobs] == ([JobState.STOPPED] if stops else [])


def test_incidents_about_the_database_end_when_all_hosts_are_taken_over() -> None:
    whole = looked(told(*range(6)))
    assert {i.cause: i.state.closed for i in whole.incidents} == {"database_older": True}
    other = msgspec.structs.replace(told(2)[0], standing=msgspec.structs.replace(told(2)[0].standing, jobs=()))
    part = looked((*told(1), other), after_s=WHOLE_WITHIN_S)
    assert part.adoption is not None and [one.standing.host_id for one in part.adoption.settled] == ["h2"]
    assert {i.cause: i.state.closed for i in part.incidents} == {"database_older": False, NOT_ADOPTED: False}


def test_a_job_that_hosts_know_better_is_left_alone_until_it_is_adopted() -> None:
    stopped = msgspec.structs.replace(known(4), stop_requested=True)
    for after_s in (0.0, GATHER_S, WHOLE_WITHIN_S):
        outcome = looked(told(0), after_s=after_s, jobs=(stopped,))
        assert outcome.jobs == () and DecisionKind.STOP_JOB not in {d.kind for d in outcome.decisions}
    assert looked((), jobs=(stopped,)).jobs != ()


def test_actions_of_a_job_that_hosts_know_better_end_at_their_word() -> None:
    """They would go on for two seconds, on hosts that are not ahead, and start what the database remembers."""
    acting = msgspec.structs.replace(unadopted(cause="host_restarted"), action_id="act-1")
    view = View((known(4),), (), (acting,), (), (), next_incident=5, next_decision=1, cluster="mine")
    view = msgspec.structs.replace(view, actions=(action(state=ActionState.DISPATCHED),))
    assert decide(view, [], PolicySettings(), NOW).superseded_actions == ()
    at_once = msgspec.structs.replace(view, standings=told(0))
    assert decide(at_once, [], PolicySettings(), NOW).superseded_actions == ("act-1",)
    spare = msgspec.structs.replace(told(0)[0], standing=msgspec.structs.replace(told(0)[0].standing, jobs=()))
    unheard = msgspec.structs.replace(view, standings=(spare,))
    assert decide(unheard, [], PolicySettings(), NOW).superseded_actions == (), "no host has said more of this job"
    elsewhere = msgspec.structs.replace(view, standings=told(0, cluster="other", unanswered_s=1.0))
    assert decide(elsewhere, [], PolicySettings(), NOW).superseded_actions == (), "another cluster's job, perhaps"


@pytest.mark.parametrize(("state", "is_over"), [(HostState.HEALTHY, False), (HostState.SILENT, True)])
def test_nobody_waits_for_ranks_of_a_host_that_is_lost(state: HostState, is_over: bool) -> None:
    """Nothing renews what it reported, and the job would wait for a person for ever."""
    lost = host("h1", state=state, since=NOW - 30, last_report_at=NOW - 40)
    view = View((known(4),), (lost,), (), (), (), next_incident=5, next_decision=1, cluster="mine")
    view = msgspec.structs.replace(view, standings=told(1))
    outcome = decide(view, [], PolicySettings(), NOW + WHOLE_WITHIN_S)
    assert (NOT_ADOPTED not in {i.cause for i in outcome.incidents}) is is_over
    assert (outcome.adoption is not None and len(outcome.adoption.settled) == 1) is is_over
    opened = msgspec.structs.replace(view, incidents=(unadopted(),))
    assert ("inc-1" in closed(decide(opened, [], PolicySettings(), NOW))) is is_over


def test_the_round_that_adopts_decides_nothing_else() -> None:
    """Its decisions would have numbers that the hosts have seen, and their commands an epoch that the hosts refuse."""
    stopped = msgspec.structs.replace(known(5), stop_requested=True)  # known here as the hosts know it
    outcome = looked(told(0), jobs=(stopped,))
    assert outcome.adoption is not None
    assert {decision.kind for decision in outcome.decisions} == {DecisionKind.ADOPT}
    (decision,) = looked((), jobs=(stopped,)).decisions
    assert decision.kind is DecisionKind.STOP_JOB, "the next round does"


@pytest.mark.parametrize(("ended", "stops"), [(4, False), (5, True), (6, True)])
def test_a_job_that_hosts_ended_is_stopped_here_too(ended: int, stops: bool) -> None:
    (one,) = told(1)
    standing = msgspec.structs.replace(one.standing, jobs=(), ended={"job": ended})
    outcome = looked(
        (msgspec.structs.replace(one, standing=standing, sealed=(), ended={"job": ("", ended)}),),
        jobs=(known(5),),
        incidents=(unadopted(cause="worker_killed"),),
    )
    changes = [change.state for change in outcome.jobs if change.job == "job"]
    assert (changes == [JobState.STOPPED]) is stops
    assert closed(outcome) >= ({"inc-1"} if stops else set()), "its incidents are about the past"
