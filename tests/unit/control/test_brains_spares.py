"""Which free host takes the ranks of one that is left, and why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import (
    GENERATION,
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

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, Incident, IncidentState
from flyball.contracts.reports.conditions import HostCondition, Severity
from services.controller.round.choices import spare_ranking
from services.controller.round.choices.spare_choice import place
from services.controller.round.view import ActionView, HostView, JobView, PastFailure, StandingCondition, View

WARNED = (StandingCondition(HostCondition("thermal", Severity.WARNING, "hot", source="probe gpu", since=NOW - 60)),)
SILENT = host("b", state=HostState.SILENT, job="job", since=NOW - 20, last_report_at=NOW - 30, fabric="ib-1")
GIB = 1 << 30


def spare(name: str, **more: Any) -> HostView:  # noqa: ANN401 - of HostView
    return host(name, state=HostState.SPARE, **{"fabric": "ib-1", **more})


def lost_b(*spares: HostView) -> View:
    hosts = (host("a", job="job", fabric="ib-1", failure_domain="rack-1"), SILENT, *spares)
    opened = incident(state=IncidentState.DECIDING, generation=2, cause="host_silent", action_id="")
    return view(hosts=hosts, incidents=[opened], copies=SAVED)


@pytest.mark.parametrize(
    ("worse", "why"),
    [
        ({"conditions": WARNED}, "d has no warning, unlike c."),
        ({"fabric": "ib-2"}, "d is in the fabric of the other hosts, unlike c."),
        ({"fabric": ""}, "d is in the fabric of the other hosts, unlike c."),
        ({"failure_domain": "rack-1"}, "d is in no failure domain of the replicas' hosts, unlike c."),
        ({"recent_losses": 1}, "d was lost less often within the last hour, unlike c."),
        ({"failed_at": (NOW - 9000, NOW - 8000)}, "d failed less often, unlike c."),
        ({"engine_address": ""}, "d has a running engine, unlike c."),
    ],
)
def test_each_criterion_chooses_a_spare_and_is_its_reason(worse: dict[str, Any], why: str) -> None:
    decision = decided(decide(lost_b(msgspec.structs.replace(spare("c"), **worse), spare("d")), [], SETTINGS, NOW))
    assert decision.reason.endswith(f"d takes rank 1 of b. {why}")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"fabric": "ib-2"}, {"conditions": WARNED}),
        ({"failure_domain": "rack-1"}, {"fabric": "ib-2"}),
        ({"recent_losses": 2}, {"failure_domain": "rack-1"}),
        ({"failed_at": (NOW - 9000,)}, {"recent_losses": 1}),
    ],
)
def test_the_criteria_are_asked_in_their_order(better: dict[str, Any], worse: dict[str, Any]) -> None:
    hosts = [msgspec.structs.replace(spare("c"), **worse), msgspec.structs.replace(spare("d"), **better)]
    for free in (hosts, hosts[::-1]):
        assert "d takes rank 1 of b." in decided(decide(lost_b(*free), [], SETTINGS, NOW)).reason


@pytest.mark.parametrize(
    ("only", "why"),
    [
        ({}, "c is the only free host."),
        (
            {"fabric": "ib-2", "failure_domain": "rack-1"},
            "c is the only free host, although it is not known to be in the fabric of the other hosts and it is in a "
            "failure domain of the replicas' hosts.",
        ),
    ],
)
def test_a_job_takes_a_bad_spare_rather_than_stand_still_and_says_so(only: dict[str, Any], why: str) -> None:
    decision = decided(decide(lost_b(msgspec.structs.replace(spare("c"), **only)), [], SETTINGS, NOW))
    assert decision.reason.endswith(f"c takes rank 1 of b. {why}")


def test_equal_spares_are_said_to_be_equal() -> None:
    assert decided(decide(lost_b(spare("c"), spare("d")), [], SETTINGS, NOW)).reason.endswith(
        "c is the first of 2 free hosts that are alike."
    )


def test_without_a_known_fabric_no_host_is_in_another() -> None:
    nowhere = spare_ranking.Surroundings()
    assert [spare_ranking.same_fabric(spare("c", fabric=fabric), nowhere) for fabric in ("", "ib-1")] == [0, 0]


@pytest.mark.parametrize(
    ("fabrics", "hosts", "expected"),
    [
        (("x", "y", "x", "y", "y"), (), "bde"),
        (("x", "y", "x", "y", ""), (), "abc"),  # no fabric has three
        (("", "", "", "", ""), (), "abc"),
        (("x", "y", "x", "y", "y"), tuple("abcde"), "abc"),  # the user's choice
    ],
)
def test_a_job_starts_in_one_fabric_if_one_has_enough_hosts(
    fabrics: tuple[str, ...], hosts: tuple[str, ...], expected: str
) -> None:
    spec = JobSpec(job="j", argv=("t",), workdir="/", nnodes=3, nproc_per_node=1, hosts=hosts)
    free = [spare(name, fabric=fabric) for name, fabric in zip("abcde", fabrics, strict=True)]
    assert "".join(part.host_id for part in place(spec, free) or ()) == expected


# --- two jobs that park for one host ---------------------------------------------------------------------------------


def other_job() -> JobView:
    spec = msgspec.structs.replace(SPEC, job="other")
    parts = tuple(msgspec.structs.replace(part, host_id=f"o{part.host_id}") for part in GENERATION.hosts)
    ranks = tuple(msgspec.structs.replace(one, host_id=f"o{one.host_id}") for one in GENERATION.ranks)
    generation = msgspec.structs.replace(GENERATION, hosts=parts, ranks=ranks, peers={})
    return msgspec.structs.replace(JOB, spec=spec, generation=generation)


def two_jobs(*free: HostView, incidents: tuple[Incident, ...] = (), actions: tuple[ActionView, ...] = ()) -> View:
    warned = {"conditions": WARNED}
    hosts = [host("a", job="job"), host("b", job="job", **warned), host("oa", job="other")]
    hosts.append(host("ob", job="other", **warned))
    seen = view(hosts=(*hosts, *free), incidents=incidents, actions=actions, copies=SAVED)
    return msgspec.structs.replace(seen, jobs=(JOB, other_job()))


def parked_for(name: str, *, state: ActionState = ActionState.SUCCEEDED) -> ActionView:
    plan = ActionPlan(
        DecisionKind.EMERGENCY_CHECKPOINT, "other", SPEC, 2, stop_hosts=("oa", "ob"), claimed_hosts=(name,)
    )
    return action(plan=plan, state=state, phase="flush", restore_step=None)


PARKED = incident(job="other", host_id="ob", cause="host_condition", generation=2, state=IncidentState.DECIDING)


def test_two_jobs_with_a_warning_each_save_for_two_hosts_in_one_round() -> None:
    outcome = decide(two_jobs(spare("c"), spare("d")), [], SETTINGS, NOW)
    saves = [d.action for d in outcome.decisions if d.kind is DecisionKind.EMERGENCY_CHECKPOINT]
    assert [plan and plan.claimed_hosts for plan in saves] == [("c",), ("d",)]


def test_of_two_jobs_with_one_host_the_second_waits() -> None:
    outcome = decide(two_jobs(spare("c")), [], SETTINGS, NOW)
    assert [(d.job, d.kind, d.rule) for d in outcome.decisions] == [
        ("job", DecisionKind.EMERGENCY_CHECKPOINT, "save_before_the_host_is_left"),
        ("other", DecisionKind.HOLD, "wait_for_a_spare"),
    ]


@pytest.mark.parametrize("state", [ActionState.DISPATCHED, ActionState.SUCCEEDED])
def test_a_host_that_ranks_have_parked_for_stays_theirs_in_later_rounds(state: ActionState) -> None:
    acting = PARKED if state.ended else msgspec.structs.replace(PARKED, state=IncidentState.ACTING)
    seen = two_jobs(spare("c"), incidents=(acting,), actions=(parked_for("c", state=state),))
    of_job = [d for d in decide(seen, [], SETTINGS, NOW).decisions if d.job == "job"]
    assert [(d.kind, d.rule) for d in of_job] == [(DecisionKind.HOLD, "wait_for_a_spare")]


@pytest.mark.parametrize("state", [ActionState.FAILED, ActionState.SUPERSEDED])
def test_a_save_that_came_to_nothing_claims_no_host(state: ActionState) -> None:
    seen = two_jobs(spare("c"), incidents=(PARKED,), actions=(parked_for("c", state=state),))
    (first,) = (d for d in decide(seen, [], SETTINGS, NOW).decisions if d.job == "job")
    assert first.kind is DecisionKind.EMERGENCY_CHECKPOINT


@pytest.mark.parametrize(("free", "taken"), [("cd", "d"), ("c", "c")])
def test_a_failure_takes_a_claimed_host_last_but_does_not_stand_still_for_it(free: str, taken: str) -> None:
    seen = two_jobs(*map(spare, free), incidents=(PARKED,), actions=(parked_for("c"),))
    hosts = tuple(SILENT if one.host_id == "b" else one for one in seen.hosts)
    lost = incident(incident_id="inc-2", state=IncidentState.DECIDING, generation=2, cause="host_silent", action_id="")
    seen = msgspec.structs.replace(seen, hosts=hosts, incidents=(PARKED, lost))
    (moved,) = (d for d in decide(seen, [], SETTINGS, NOW).decisions if d.job == "job")
    assert moved.evidence["to"] == taken
    assert ("another job's ranks have parked for it" in moved.reason) == (taken == "c")


def test_a_job_that_waits_does_not_start_on_a_claimed_host_and_says_why() -> None:
    spec = msgspec.structs.replace(SPEC, job="new", nnodes=1)
    waiting = JobView(spec, JobState.SUBMITTED, NOW - 5, False, None)
    saving = msgspec.structs.replace(PARKED, state=IncidentState.ACTING)
    seen = two_jobs(spare("c"), incidents=(saving,), actions=(parked_for("c", state=ActionState.DISPATCHED),))
    outcome = decide(msgspec.structs.replace(seen, jobs=(*seen.jobs, waiting)), [], SETTINGS, NOW)
    assert [change.state for change in outcome.jobs if change.job == "new"] == [JobState.SUBMITTED]


# --- a host that ran out of memory -----------------------------------------------------------------------------------

OOM = msgspec.structs.replace(KILLED, error_class="host_out_of_memory")


@pytest.mark.parametrize(
    ("own", "spares", "rule", "says"),
    [
        (64, {"c": 64, "d": 128}, "retry_on_a_larger_host", "b has 64 GiB of memory, and d 128 GiB"),
        (64, {"c": 64, "d": 0}, "retry_with_as_much_memory", "than b (64 GiB): generation 3 starts in place"),
        (0, {"c": 64}, "retry_with_as_much_memory", "No free host is known to have more memory: generation 3"),
        (64, {}, "retry_with_as_much_memory", "more memory than b (64 GiB)"),
    ],
)
def test_ranks_that_the_kernel_killed_for_memory_are_tried_once_with_more(
    own: int, spares: dict[str, int], rule: str, says: str
) -> None:
    free = [spare(name, memory_bytes=size * GIB) for name, size in spares.items()]
    hosts = (host("a", job="job"), host("b", job="job", memory_bytes=own * GIB), *free)
    decision = decided(decide(view(hosts=hosts, copies=SAVED), [say(OOM)], SETTINGS, NOW))
    assert decision.rule == rule and says in decision.reason
    again = msgspec.structs.replace(JOB, failures=(PastFailure(1, "worker_killed", "host_out_of_memory", "", 50),))
    second = decided(decide(view(job=again, hosts=hosts, copies=SAVED), [say(OOM)], SETTINGS, NOW))
    assert second.rule == "fail_on_repeated_lack_of_memory"
