"""Whose word about a job counts, and for what: seals, hosts that say it ended, hosts that say nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from support.jobs.placements import make_placement
from support.policy.checked import decide
from support.policy.views import host

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import DecisionKind, Incident
from flyball.contracts.identity import Fence
from flyball.contracts.orders import Order, OrderKind, OrderState
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed
from services.actuator.rules.host_parts import host_parts
from services.controller.round.view import (
    GenerationView,
    HostView,
    JobView,
    Outcome,
    PolicySettings,
    ReportedStanding,
    View,
    WordChange,
)
from services.controller.updates.held_jobs import IMPLAUSIBLE, NOT_ADOPTED
from services.controller.updates.standing_words import (
    GATHER_S,
    HEARD_WITHIN_S,
    MAX_EPOCH_JUMP,
    MAX_NUMBER_JUMP,
    WORD_WITHIN_S,
)
from services.rules.grant_seals import whole_digest

NOW = 1000.0
SPEC = JobSpec("job", ("train.py",), "/work", nnodes=3)
WHOLE = make_placement({f"h{n}": (n,) for n in range(3)}, generation=5)
PARTS = host_parts(WHOLE)
SEAL = GrantSeal("", 5, 9, "part", whole_digest(WHOLE), "verified by the store")


def told(
    name: str,
    *,
    sealed: bool = True,
    runs: bool = True,
    ended: int | None = None,
    holds: bool = True,
    obeyed: LastObeyed = LastObeyed("mine", 9, "act-abcd-31.start.h.1"),  # noqa: B008 - frozen
) -> ReportedStanding:
    """What a host tells. `ended`: the generation in which it was placed, and which it says has ended."""
    held = ()
    if holds and ended is None:
        ranks = PARTS[name].host(name).ranks if runs else ()  # type: ignore[union-attr]  # it has a part
        held = (HeldJob(SPEC, PARTS[name], Fence(9, 5), ranks, seal=SEAL if sealed else GrantSeal()),)
    ends: Mapping[str, int] = {} if ended is None else {"job": ended}
    proved = {job: ("", generation) for job, generation in ends.items()}
    standing = HostStanding(name, "i", NOW, obeyed, 100.0, held, ended=ends)
    return ReportedStanding(standing, NOW, NOW, ("job",) if held and sealed else (), proved)


def looked(
    *standings: ReportedStanding,
    after_s: float,
    hosts: tuple[HostView, ...] = tuple(host(f"h{n}") for n in range(3)),
    jobs: tuple[JobView, ...] = (),
    orders: tuple[Order, ...] = (),
    incidents: tuple[Incident, ...] = (),
    asked: tuple[str, ...] = (),
    settings: PolicySettings = PolicySettings(spare_fresh_s=1e6),  # noqa: B008 - frozen
) -> Outcome:
    view = View(jobs, hosts, incidents, (), (), next_incident=5, next_decision=20, cluster="mine")
    view = msgspec.structs.replace(view, standings=standings, orders=orders, epoch=8, asked=asked)
    return decide(view, [], settings, NOW + after_s)


def known(generation: int) -> JobView:
    """The job as this database knows it."""
    view = GenerationView(generation, None, (), WHOLE.hosts, {}, NOW - 50, None, 0)
    return JobView(SPEC, JobState.RUNNING, NOW - 100, False, view)


def adopted(outcome: Outcome) -> list[str]:
    return [job.spec.job for job in outcome.adoption.jobs] if outcome.adoption is not None else []


def held_for(outcome: Outcome, cause: str = NOT_ADOPTED) -> Incident:
    (found,) = (i for i in outcome.incidents if i.cause == cause and not i.state.closed)
    return found


ORDER = Order(OrderKind.ADOPT, "job", NOW)
ALL = (told("h0"), told("h1"), told("h2"))


def test_a_job_is_adopted_when_each_placed_host_that_is_heard_has_spoken() -> None:
    assert adopted(looked(*ALL, after_s=GATHER_S)) == ["job"]
    waits = looked(*ALL[:2], after_s=GATHER_S)
    assert adopted(waits) == []
    assert waits.words == (WordChange("h2", is_needed=True),), "h2 is asked"
    assert looked(*ALL[:2], after_s=GATHER_S, asked=("h2",)).words == (), "once"
    reborn = told("h2", holds=False, obeyed=LastObeyed())
    assert adopted(looked(*ALL[:2], reborn, after_s=GATHER_S)) == ["job"], "its ranks are lost, the job is not"


def test_a_host_that_is_heard_and_does_not_speak_is_a_matter_for_an_operator() -> None:
    outcome = looked(*ALL[:2], after_s=WORD_WITHIN_S, asked=("h2",))
    assert adopted(outcome) == []
    assert "flyball adopt job" in held_for(outcome).message
    assert adopted(looked(*ALL[:2], after_s=WORD_WITHIN_S, orders=(ORDER,))) == ["job"]
    lost = (host("h0"), host("h1"), host("h2", state=HostState.SILENT))
    assert adopted(looked(*ALL[:2], after_s=GATHER_S, hosts=lost)) == ["job"], "a lost host says nothing any more"
    strangers = (host("h0"), host("h1"))
    assert adopted(looked(*ALL[:2], after_s=HEARD_WITHIN_S - 0.1, hosts=strangers)) == []
    assert adopted(looked(*ALL[:2], after_s=HEARD_WITHIN_S, hosts=strangers)) == ["job"]


@pytest.mark.parametrize("generation", [5, 6])
def test_a_placed_host_that_says_that_it_ended_blocks_the_adoption(generation: int) -> None:
    standings = (told("h0"), told("h1"), told("h2", ended=generation))
    outcome = looked(*standings, after_s=GATHER_S)
    assert adopted(outcome) == []
    incident = held_for(outcome)
    assert "h2" in incident.message and "flyball adopt job" in incident.message
    assert WordChange("h2", is_needed=True) in outcome.words, "its word is kept, though it gets commands"
    by_hand = looked(*standings, after_s=GATHER_S, orders=(ORDER,))
    assert adopted(by_hand) == ["job"]
    assert [(change.order.kind, change.state) for change in by_hand.orders] == [(OrderKind.ADOPT, OrderState.OVER)]


def test_the_end_of_an_earlier_run_says_nothing_of_a_later_one() -> None:
    """The first run was forgotten with a database; the next one counts its generations from 1."""
    earlier = msgspec.structs.replace(told("h2", ended=9), ended={"job": ("20250101-000000-000", 9)})
    later = "20260101-000000-000"
    whole = msgspec.structs.replace(WHOLE, run=later)
    parts, seal = host_parts(whole), msgspec.structs.replace(SEAL, run=later, whole=whole_digest(whole))
    runs = []
    for name in ("h0", "h1"):
        ranks = parts[name].host(name).ranks  # type: ignore[union-attr]  # it has a part
        held = HeldJob(SPEC, parts[name], Fence(9, 5), ranks, seal=seal)
        standing = HostStanding(name, "i", NOW, LastObeyed("mine", 9, "act-1"), 100.0, (held,))
        runs.append(ReportedStanding(standing, NOW, NOW, ("job",)))
    assert adopted(looked(*runs, earlier, after_s=GATHER_S)) == ["job"]
    same = msgspec.structs.replace(earlier, ended={"job": (later, 9)})
    assert adopted(looked(*runs, same, after_s=GATHER_S)) == []


def test_the_others_agree_when_none_of_their_ranks_runs() -> None:
    outcome = looked(told("h0", runs=False), told("h1", runs=False), told("h2", ended=5), after_s=GATHER_S)
    assert (adopted(outcome), [i for i in outcome.incidents if i.cause == NOT_ADOPTED]) == ([], [])


def test_a_supervisor_of_one_job_adopts_no_other() -> None:
    """A batch system ends a job with all its processes: nobody is left to record the end, and the next job's command
    starts on what the first one left."""
    of_another = PolicySettings(spare_fresh_s=1e6, adopt_only="another")
    left = tuple(told(f"h{n}", runs=False) for n in range(3))
    outcome = looked(*left, after_s=GATHER_S, settings=of_another)
    assert adopted(outcome) == []
    assert outcome.adoption is not None and len(outcome.adoption.settled) == 3, "its hosts get commands"
    assert NOT_ADOPTED not in {i.cause for i in outcome.incidents}
    runs = looked(*ALL, after_s=GATHER_S, settings=of_another)
    assert adopted(runs) == [] and "flyball adopt job" in held_for(runs).message
    assert adopted(looked(*ALL, after_s=GATHER_S, settings=of_another, orders=(ORDER,))) == ["job"]
    own = msgspec.structs.replace(of_another, adopt_only="job")
    assert adopted(looked(*left, after_s=GATHER_S, settings=own)) == ["job"]


def test_an_end_without_a_seal_counts_for_nothing() -> None:
    liar = msgspec.structs.replace(told("h2", ended=10**6), ended={})
    assert adopted(looked(told("h0"), told("h1"), liar, after_s=GATHER_S)) == ["job"]
    running = looked(liar, after_s=GATHER_S, jobs=(known(5),))
    assert JobState.STOPPED not in {change.state for change in running.jobs}


def test_a_running_job_is_stopped_at_the_word_of_all_its_hosts_only() -> None:
    ends = [told(f"h{n}", ended=5) for n in range(3)]
    assert [c.state for c in looked(*ends, after_s=GATHER_S, jobs=(known(5),)).jobs] == [JobState.STOPPED]
    one = looked(ends[0], told("h1"), told("h2"), after_s=GATHER_S, jobs=(known(5),))
    assert one.jobs == () and WordChange("h0", is_needed=True) in one.words
    late = looked(ends[0], told("h1"), told("h2"), after_s=WORD_WITHIN_S, jobs=(known(5),))
    assert "flyball stop job" in held_for(late).message
    by_hand = looked(ends[0], told("h1"), told("h2"), after_s=WORD_WITHIN_S, jobs=(known(5),), orders=(ORDER,))
    assert NOT_ADOPTED not in {i.cause for i in by_hand.incidents}
    older = looked(told("h0", ended=4), after_s=WORD_WITHIN_S, jobs=(known(5),))
    assert JobState.STOPPED not in {change.state for change in older.jobs}, "it was placed in an earlier generation"
    assert older.words == ()


def test_without_a_seal_a_job_is_shown_and_its_hosts_get_commands() -> None:
    standings = tuple(told(f"h{n}", sealed=False) for n in range(3))
    outcome = looked(*standings, after_s=GATHER_S)
    assert outcome.adoption is not None and len(outcome.adoption.settled) == 3
    assert adopted(outcome) == []
    shown = [i for i in outcome.incidents if i.cause == NOT_ADOPTED]
    assert [(i.job, i.host_id) for i in shown] == [("", f"h{n}") for n in range(3)], "one for each host"
    assert all("flyball adopt job" in i.message and "train.py" in i.message for i in shown)
    assert adopted(looked(*standings, after_s=GATHER_S, orders=(ORDER,))) == ["job"]


def test_a_host_that_runs_an_unproved_job_gets_no_other_work() -> None:
    other = JobView(JobSpec("other", ("x.py",), "/work"), JobState.SUBMITTED, NOW, False, None)
    free = looked(after_s=GATHER_S, hosts=(host("h0"),), jobs=(other,))
    assert [d.kind for d in free.decisions] == [DecisionKind.START_JOB]
    settled = msgspec.structs.replace(told("h0", sealed=False), is_settled=True, is_needed=True)
    busy = looked(settled, after_s=GATHER_S, hosts=(host("h0"),), jobs=(other,))
    assert DecisionKind.START_JOB not in {d.kind for d in busy.decisions}


def test_without_seals_each_host_that_is_heard_speaks_for_itself() -> None:
    """An operator is not made to give another host what that host never held."""
    outcome = looked(
        told("h0", sealed=False),
        told("h1", sealed=False),
        told("h2", holds=False),
        after_s=GATHER_S,
        orders=(ORDER,),
    )
    assert adopted(outcome) == []
    (change,) = outcome.orders
    assert change.state is OrderState.REFUSED and "h2 does not hold the same" in change.message


def test_hosts_that_tell_different_things_under_one_name_are_all_shown_and_none_is_adopted() -> None:
    """One of them may hope that an operator adopts its own under the name of an honest job."""
    placement = make_placement({"h9": (0,)}, generation=999)
    spec = JobSpec("job", ("sh", "-c", "id"), "/work")
    told_by_h9 = HostStanding("h9", "i", NOW, LastObeyed(), 0.0, (HeldJob(spec, placement, Fence(9, 999), (0,)),))
    liar = ReportedStanding(told_by_h9, NOW, NOW)
    honest = tuple(told(f"h{n}", sealed=False) for n in range(3))
    shown = [i for i in looked(*honest, liar, after_s=GATHER_S).incidents if i.cause == NOT_ADOPTED]
    assert [i.host_id for i in shown] == ["h0", "h1", "h2", "h9"]
    assert "generation 999" in shown[3].message and "train.py" in shown[0].message
    ordered = looked(*honest, liar, after_s=GATHER_S, orders=(ORDER,))
    assert adopted(ordered) == [] and [change.state for change in ordered.orders] == [OrderState.REFUSED]
    proved = looked(*ALL, liar, after_s=GATHER_S)
    assert adopted(proved) == ["job"], "a seal decides between them"


def test_an_order_adds_to_sealed_parts_only_what_is_of_the_same_grant() -> None:
    """The operator was shown the sealed job, and nothing else under its name."""
    placement = make_placement({"h9": (0,)}, generation=999)
    spec = JobSpec("job", ("sh", "-c", "id"), "/work")
    held = HeldJob(spec, placement, Fence(9, 999), (0,))
    liar = ReportedStanding(HostStanding("h9", "i", NOW, LastObeyed(), 0.0, (held,)), NOW, NOW)
    honest = (told("h0"), told("h1"), told("h2", sealed=False))
    outcome = looked(*honest, liar, after_s=GATHER_S, orders=(ORDER,))
    assert outcome.adoption is not None
    (job,) = outcome.adoption.jobs
    assert (job.spec, job.plan.generation) == (SPEC, 5), "h2 has an older daemon"


def in_run(run: str, generation: int, name: str = "h0") -> ReportedStanding:
    """A host that holds all of a job by itself."""
    whole = make_placement({name: (0,)}, generation=generation, run=run)
    seal = GrantSeal(run, generation, 9, "part", whole_digest(whole), "verified by the store")
    held = HeldJob(msgspec.structs.replace(SPEC, nnodes=1), whole, Fence(9, generation), (0,), seal=seal)
    standing = HostStanding(name, "i", NOW, LastObeyed("mine", 9, "act-1"), 100.0, (held,))
    return ReportedStanding(standing, NOW, NOW, ("job",))


def test_the_newer_run_counts_whatever_the_generations() -> None:
    older, newer = in_run("20250101-000000-000", 9, "h0"), in_run("20260101-000000-000", 2, "h1")
    outcome = looked(older, newer, after_s=GATHER_S)
    assert outcome.adoption is not None
    assert [(job.plan.run, job.plan.generation) for job in outcome.adoption.jobs] == [("20260101-000000-000", 2)]
    present = msgspec.structs.replace(known(2).generation, run="20260101-000000-000")  # type: ignore[type-var]
    knows = msgspec.structs.replace(known(2), generation=present)
    assert adopted(looked(older, after_s=GATHER_S, jobs=(knows,))) == [], "the database knows a newer run"


def test_a_job_is_adopted_from_a_host_that_has_other_jobs_to_wait_for() -> None:
    """It is not settled, and counters still go on above what it obeyed."""
    other = make_placement({"h0": (0,), "h7": (1,)}, job="other", generation=3)
    seal = GrantSeal("", 3, 9, "part", whole_digest(other), "verified by the store")
    part = host_parts(other)["h0"]
    second = HeldJob(JobSpec("other", ("train.py",), "/work", nnodes=2), part, Fence(9, 3), (0,), seal=seal)
    first = in_run("", 5)
    standing = msgspec.structs.replace(first.standing, jobs=(*first.standing.jobs, second))
    outcome = looked(ReportedStanding(standing, NOW, NOW, ("job", "other")), after_s=GATHER_S)
    assert adopted(outcome) == ["job"]
    assert outcome.adoption is not None
    assert (outcome.adoption.settled, outcome.adoption.epoch_floor) == ((), 9)


def test_an_unproved_claim_leaves_another_hosts_job_alone() -> None:
    """The job is supervised and acted upon as before."""
    (part,) = (p for p in make_placement({"h9": (0,)}, generation=999).hosts)
    placement = msgspec.structs.replace(WHOLE, generation=999, world_size=1, hosts=(part,))
    held = HeldJob(SPEC, placement, Fence(9, 999), (0,))
    standing = HostStanding("h9", "i", NOW, LastObeyed("mine", 9, "act-1"), 0.0, (held,))
    claim = ReportedStanding(standing, NOW, NOW)
    stopped = msgspec.structs.replace(known(5), stop_requested=True)
    settled = msgspec.structs.replace(claim, is_settled=True, is_needed=True)
    outcome = looked(settled, after_s=GATHER_S, jobs=(stopped,), hosts=(*(host(f"h{n}") for n in range(3)), host("h9")))
    assert DecisionKind.STOP_JOB in {d.kind for d in outcome.decisions}
    assert {i.job for i in outcome.incidents if i.cause == NOT_ADOPTED} == {""}


@pytest.mark.parametrize(
    "obeyed",
    [
        LastObeyed("mine", 8 + MAX_EPOCH_JUMP + 1, "act-1"),
        LastObeyed("mine", 9, f"act-abcd-{20 + MAX_NUMBER_JUMP + 1}.start.h.1"),
        LastObeyed("", 2**63 - 2, f"act-{10**18 - 1}"),
    ],
)
def test_what_cannot_be_is_an_incident_and_the_others_go_on(obeyed: LastObeyed) -> None:
    liar = told("h9", holds=False, obeyed=obeyed)
    outcome = looked(*ALL, liar, after_s=GATHER_S)
    assert adopted(outcome) == ["job"]
    assert outcome.adoption is not None and outcome.adoption.epoch_floor == 9
    assert outcome.adoption.decision_floor == 31
    assert "h9" not in {one.standing.host_id for one in outcome.adoption.settled}
    assert held_for(outcome, IMPLAUSIBLE).host_id == "h9"
    opened = msgspec.structs.replace(held_for(outcome, IMPLAUSIBLE), incident_id="inc-1")
    over = looked(*ALL, after_s=GATHER_S, incidents=(opened,))
    assert [i.state.closed for i in over.incidents if i.cause == IMPLAUSIBLE] == [True]


def test_a_host_of_another_living_cluster_holds_up_only_its_own_jobs() -> None:
    elsewhere = told("h9", holds=False, obeyed=LastObeyed("theirs", 3, "act-7"))
    alive = msgspec.structs.replace(elsewhere, standing=msgspec.structs.replace(elsewhere.standing, unanswered_s=0.0))
    outcome = looked(*ALL, msgspec.structs.replace(alive, told_at=NOW + GATHER_S), after_s=GATHER_S)
    assert adopted(outcome) == ["job"]
    assert outcome.adoption is not None and len(outcome.adoption.settled) == 3


def test_a_word_that_is_needed_no_more_is_dropped() -> None:
    kept = msgspec.structs.replace(told("h0", sealed=False, runs=False), is_settled=True, is_needed=True)
    outcome = looked(kept, after_s=GATHER_S, asked=("h1",))
    assert outcome.words == (WordChange("h0", is_needed=False), WordChange("h1", is_needed=False))


def test_one_generation_granted_twice_is_that_of_the_newer_epoch() -> None:
    """Two copies of a database: parts of the two do not mix."""
    other = msgspec.structs.replace(WHOLE, master_port=WHOLE.master_port + 1)
    seal = GrantSeal("", 5, 12, "part", whole_digest(other), "verified by the store")
    newer = []
    for name, part in host_parts(other).items():
        held = HeldJob(SPEC, part, Fence(12, 5), part.host(name).ranks, seal=seal)  # type: ignore[union-attr]
        standing = HostStanding(name, "i", NOW, LastObeyed("mine", 12, "act-9"), 100.0, (held,))
        newer.append(ReportedStanding(standing, NOW, NOW, ("job",)))
    outcome = looked(newer[0], newer[1], told("h2"), after_s=GATHER_S)
    assert outcome.adoption is not None
    (job,) = outcome.adoption.jobs
    assert job.placement.master_port == WHOLE.master_port + 1
