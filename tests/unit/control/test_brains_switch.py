"""Hosts that fall silent together behind one switch are one problem: one incident and one decision."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import GENERATION, NOW, SETTINGS, host

from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import DecisionKind, IncidentState
from flyball.contracts.reports.signals import HostSilent, Signal
from services.controller.round.view import HostView, JobView, Outcome, RankView, View
from services.sensor.detector.correlation import Fall, due_groups

BEHIND = 32
BEFORE = tuple(f"host-{number:02}" for number in range(BEHIND))
SPARES = tuple(f"spare-{number:02}" for number in range(BEHIND))
SPEC = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=BEHIND, nproc_per_node=1)


def job() -> JobView:
    parts = tuple(HostRanks(name, "10.0.0.1", f"{name}:7", (rank,)) for rank, name in enumerate(BEFORE))
    ranks = tuple(RankView(rank, name, 50, Phase.STEP, NOW - 5.0) for rank, name in enumerate(BEFORE))
    generation = msgspec.structs.replace(GENERATION, hosts=parts, ranks=ranks, peers={})
    return JobView(SPEC, JobState.RUNNING, NOW - 1000, False, generation, newest_step=50)


def hosts(spares: int) -> tuple[HostView, ...]:
    gone = (host(name, job="job", failure_domain="switch-7", last_report_at=NOW - 5.0) for name in BEFORE)
    return (*gone, *(host(name, failure_domain="switch-8") for name in SPARES[:spares]))


def fallen() -> list[Signal]:
    """What a sensor says about reports that stopped within a third of a second."""
    falls = [
        Fall(name, "switch-7", 100.0 + number / 100, interval_s=1.0, due_s=103.0) for number, name in enumerate(BEFORE)
    ]
    (group,) = due_groups(falls, 103.5)
    assert group.domain == "switch-7" and group.host_ids == BEFORE
    return [
        Signal(
            "sensor.s",
            "i1",
            number,
            NOW,
            HostSilent(name, 5.0, 3.0, (), group.domain, len(group.host_ids), group.within_s),
        )
        for number, name in enumerate(group.host_ids, 1)
    ]


@pytest.mark.parametrize("spares", [BEHIND, 0])
def test_all_hosts_behind_a_switch_are_one_incident(spares: int) -> None:
    view = View((job(),), hosts(spares), (), (), (), 7, 70)
    outcome = decide(view, fallen(), SETTINGS, NOW)
    (incident,), (decision,) = outcome.incidents, outcome.decisions
    assert incident.cause == "host_silent"
    assert len(outcome.hosts) == BEHIND and all(change.state is HostState.SILENT for change in outcome.hosts)
    if not spares:
        assert decision.kind is DecisionKind.HOLD and "32 hosts must be replaced" in decision.reason
        return
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE
    assert decision.action is not None and decision.action.next is not None
    assert {part.host_id for part in decision.action.next.hosts} == set(SPARES)


# --- several jobs behind one switch ----------------------------------------------------------------------------------


def two_jobs(*, spares: int = BEHIND, later: int = 0) -> View:
    """The even hosts are those of job even, the odd ones those of job odd; the last `later` ones have not fallen."""
    jobs, whole = [], job()
    assert whole.generation is not None
    for name, first in (("even", 0), ("odd", 1)):
        places = range(first, BEHIND, 2)
        parts = tuple(msgspec.structs.replace(whole.generation.hosts[n], ranks=(k,)) for k, n in enumerate(places))
        ranks = tuple(msgspec.structs.replace(whole.generation.ranks[n], rank=k) for k, n in enumerate(places))
        generation = msgspec.structs.replace(whole.generation, hosts=parts, ranks=ranks)
        spec = msgspec.structs.replace(SPEC, job=name, nnodes=len(parts))
        jobs.append(msgspec.structs.replace(whole, spec=spec, generation=generation))
    owners = ("even", "odd") * BEHIND
    placed = [msgspec.structs.replace(one, job=one.job and owners[n]) for n, one in enumerate(hosts(spares))]
    return View(tuple(jobs), tuple(placed), (), (), (), 7, 70)


def after(seen: View, outcome: Outcome, **more: Any) -> View:  # noqa: ANN401 - of View
    """What the store shows in the next round, without closed incidents and without new generations."""
    known = {one.incident_id: one for one in (*seen.incidents, *outcome.incidents)}
    state = {change.host_id: change for change in outcome.hosts}
    now = [
        msgspec.structs.replace(one, state=state[one.host_id].state, since=NOW, reason=state[one.host_id].reason)
        if one.host_id in state
        else one
        for one in seen.hosts
    ]
    facts: dict[str, Any] = {
        "incidents": tuple(one for one in known.values() if not one.state.closed),
        "hosts": tuple(now),
        "next_incident": seen.next_incident + len(outcome.incidents),
        "next_decision": seen.next_decision + len(outcome.decisions),
    }
    return msgspec.structs.replace(seen, **{**facts, **more})


def test_two_jobs_that_lose_hosts_behind_two_switches_have_one_incident_with_both_as_parts() -> None:
    """The fall behind the second switch opens none: its jobs' incidents are parts already."""

    def switch_of(name: str) -> str:
        return "switch-9" if BEFORE.index(name) >= BEHIND // 2 else "switch-7"

    seen = two_jobs()
    moved = (
        msgspec.structs.replace(one, failure_domain=switch_of(one.host_id)) if one.host_id in BEFORE else one
        for one in seen.hosts
    )
    signals = []
    for signal in fallen():
        assert isinstance(signal.body, HostSilent)
        body = msgspec.structs.replace(signal.body, domain=switch_of(signal.body.host_id), together=BEHIND // 2)
        signals.append(msgspec.structs.replace(signal, body=body))
    outcome = decide(msgspec.structs.replace(seen, hosts=tuple(moved)), signals, SETTINGS, NOW)
    whole = [one for one in outcome.incidents if one.cause == "domain_silent"]
    parts = {one.incident_id for one in outcome.incidents if one.cause == "host_silent"}
    assert [set(one.parts) for one in whole] == [parts] and len(parts) == 2
    assert not whole[0].state.closed


@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_jobs_behind_a_switch_are_one_incident_with_the_decisions_of_both(is_reversed: bool) -> None:
    outcome = decide(two_jobs(), fallen()[:: -1 if is_reversed else 1], SETTINGS, NOW)
    incidents = {incident.incident_id: incident for incident in outcome.incidents}
    (whole,) = (incident for incident in incidents.values() if incident.cause == "domain_silent")
    assert (whole.job, len(whole.hosts), whole.state) == ("", 32, IncidentState.DECIDING)
    assert sorted(incidents[part].job for part in whole.parts) == ["even", "odd"]
    assert {incident.part_of for incident in incidents.values()} == {"", whole.incident_id}
    acted = {decision.job: decision for decision in outcome.decisions if decision.action is not None}
    assert {decision.incident_id for decision in acted.values()} == set(whole.parts)
    assert {decision.kind for decision in acted.values()} == {DecisionKind.MIGRATE_TO_SPARE}
    (said,) = (decision for decision in outcome.decisions if decision.incident_id == whole.incident_id)
    assert said.rule == "gather_what_fell_together" and said.evidence["jobs"] == "even,odd"


def test_a_job_that_another_sensor_finds_a_moment_later_joins_the_incident() -> None:
    seen = two_jobs(spares=0)
    early = [signal for number, signal in enumerate(fallen()) if number % 2 == 0]
    late = [msgspec.structs.replace(signal, seq=signal.seq + 100) for signal in fallen() if signal not in early]
    first = decide(seen, early, SETTINGS, NOW)
    assert [incident.cause for incident in first.incidents] == ["host_silent"], "one job's"
    second = decide(after(seen, first), late, SETTINGS, NOW + 1.0)
    (whole,) = (incident for incident in second.incidents if incident.cause == "domain_silent")
    assert len(whole.parts) == 2 and len(whole.hosts) == 32
    quiet = decide(after(after(seen, first), second), [], SETTINGS, NOW + 1.5)
    assert not quiet.incidents and not quiet.decisions, "said once"


def test_the_incident_of_a_domain_is_over_with_the_last_of_its_parts() -> None:
    seen = two_jobs()
    gathered = after(seen, decide(seen, fallen(), SETTINGS, NOW))
    one_left = tuple(one for one in gathered.incidents if one.job != "even")
    none_left = tuple(one for one in gathered.incidents if one.job == "")
    done = [msgspec.structs.replace(one, state=JobState.SUCCEEDED) for one in gathered.jobs]
    assert len(none_left) == 1
    for left, ends in ((one_left, False), (none_left, True)):
        jobs = (done[0], gathered.jobs[1]) if not ends else tuple(done)
        outcome = decide(msgspec.structs.replace(gathered, incidents=left, jobs=jobs), [], SETTINGS, NOW + 5)
        closed = [one for one in outcome.incidents if one.cause == "domain_silent"]
        assert [one.state for one in closed] == [IncidentState.RESOLVED] * ends


def test_jobs_in_different_domains_or_at_different_times_are_incidents_of_their_own() -> None:
    seen = two_jobs(spares=0)
    apart = [msgspec.structs.replace(one, failure_domain=f"switch-{one.job}") for one in seen.hosts]
    outcome = decide(msgspec.structs.replace(seen, hosts=tuple(apart)), fallen(), SETTINGS, NOW)
    assert [incident.cause for incident in outcome.incidents] == ["host_silent", "host_silent"]
    early = [signal for number, signal in enumerate(fallen()) if number % 2 == 0]
    late = [msgspec.structs.replace(signal, seq=signal.seq + 100) for signal in fallen() if signal not in early]
    first = decide(seen, early, SETTINGS, NOW)
    later = decide(after(seen, first), late, SETTINGS, NOW + 60)
    assert not [incident for incident in later.incidents if incident.cause == "domain_silent"]
