"""What the policy makes of hosts that are not heard of: suspect, silent, or silent together with others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from support.policy.checked import decide

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.decisions import DecisionKind, Incident, IncidentState
from flyball.contracts.reports.signals import (
    HostReturned,
    HostSilent,
    HostSuspect,
    RankStalled,
    Signal,
    SignalBody,
    WorkerExited,
)
from services.controller.round.view import GenerationView, HostView, JobView, Outcome, PolicySettings, RankView, View

NOW = 10_000.0
SETTINGS = PolicySettings()
SUSPECT = HostSuspect("h1", 4.0, 2.0, ("h0", "h2"), True)


def cluster(size: int, *, spares: int = 1, domain: str = "") -> tuple[JobView, list[HostView]]:
    """A job with a rank on each of `size` hosts. Those behind the switch `domain`, or h1 alone, have not reported for
    some time."""
    unheard = [f"h{number}" for number in range(1, size if domain else 2)]
    names = [f"h{number}" for number in range(size)]
    hosts = [
        HostView(
            host_id=name,
            state=HostState.HEALTHY,
            since=NOW - 500,
            address="ip",
            failure_domain=domain if name in unheard else name,
            engine_address=f"{name}:7",
            free_port=1,
            last_report_at=NOW - 4.0 if name in unheard else NOW - 0.2,
            job="job" if name in names else "",
        )
        for name in (*names, *(f"s{number}" for number in range(spares)))
    ]
    spec = JobSpec(job="job", argv=("t.py",), workdir="/", nnodes=size, checkpoint=CheckpointSpec(every_steps=10))
    generation = GenerationView(
        generation=2,
        parent=1,
        lineage=(LineageEntry(1, 40), LineageEntry(2)),
        hosts=tuple(HostRanks(name, "ip", f"{name}:7", (number,)) for number, name in enumerate(names)),
        peers={},
        started_at=NOW - 100,
        restore_step=40,
        restart_count=1,
        ranks=tuple(RankView(number, name, 51, Phase.STEP, NOW - 0.1) for number, name in enumerate(names)),
    )
    return JobView(spec, JobState.RUNNING, NOW - 1000, False, generation, newest_step=51, message="running"), hosts


def round_(
    job: JobView, hosts: Sequence[HostView], *bodies: SignalBody, incidents: Sequence[Incident] = (), now: float = NOW
) -> Outcome:
    signals = [Signal("sensor.1", "s", number, now, body) for number, body in enumerate(bodies, 1)]
    return decide(View((job,), tuple(hosts), tuple(incidents), (), (), 7, 70), signals, SETTINGS, now)


def silent(name: str, *, together: int = 1, witnesses: tuple[str, ...] = ()) -> HostSilent:
    return HostSilent(name, 4.0, 2.0, witnesses, domain="s7" if together > 1 else "", together=together, within_s=0.4)


def changed(hosts: Sequence[HostView], outcome: Outcome) -> list[HostView]:
    changes = {change.host_id: change for change in outcome.hosts}
    return [
        msgspec.structs.replace(h, state=changes[h.host_id].state, since=NOW, reason=changes[h.host_id].reason)
        if h.host_id in changes
        else h
        for h in hosts
    ]


def test_a_host_that_others_hear_of_is_suspect_and_nothing_is_done_about_it() -> None:
    job, hosts = cluster(3)
    outcome = round_(job, hosts, SUSPECT)
    (change,) = outcome.hosts
    assert change.state is HostState.SUSPECT
    assert not outcome.decisions and not outcome.incidents
    suspect = changed(hosts, outcome)
    assert round_(job, suspect, now=NOW + 60).empty
    (back,) = round_(job, suspect, HostReturned("h1", 20.0)).hosts
    assert back.state is HostState.HEALTHY
    suspect[1] = msgspec.structs.replace(suspect[1], last_report_at=NOW + 5)
    (seen,) = round_(job, suspect, now=NOW + 6).hosts
    assert seen.state is HostState.HEALTHY


def test_a_suspect_host_that_reports_elsewhere_is_none() -> None:
    job, hosts = cluster(3)
    hosts[1] = msgspec.structs.replace(hosts[1], last_report_at=NOW - 1.0)
    assert round_(job, hosts, SUSPECT).empty


def test_when_the_job_must_restart_a_suspect_host_cannot_be_told_and_is_replaced() -> None:
    job, hosts = cluster(3)
    suspect = changed(hosts, round_(job, hosts, SUSPECT))
    (decision,) = round_(job, suspect, RankStalled("job", 2, (0, 1, 2), Phase.STEP, 51, 9.0, 4.0)).decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE and decision.action is not None
    assert decision.action.stop_hosts == ("h0", "h2") and decision.action.unreachable_hosts == ("h1",)
    (held,) = round_(job, suspect[:3], RankStalled("job", 2, (0, 1, 2), Phase.STEP, 51, 9.0, 4.0)).decisions
    assert held.rule == "wait_for_a_spare"


def test_a_suspect_host_that_falls_silent_is_replaced() -> None:
    job, hosts = cluster(3)
    suspect = changed(hosts, round_(job, hosts, SUSPECT))
    (decision,) = round_(job, suspect, silent("h1", witnesses=("h0",))).decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE


def test_a_sensor_without_witnesses_does_not_overrule_one_that_asked_them() -> None:
    job, hosts = cluster(3)
    suspect = changed(hosts, round_(job, hosts, SUSPECT))
    assert round_(job, suspect, silent("h1")).empty
    for body in (silent("h1", witnesses=("h0",)), msgspec.structs.replace(silent("h1"), after_suspect=True)):
        assert [d.kind for d in round_(job, suspect, body).decisions] == [DecisionKind.MIGRATE_TO_SPARE]
    late = round_(job, suspect, silent("h1"), now=NOW + 30)  # of a sensor that took the place of the one that knew
    assert [change.state for change in late.hosts] == [HostState.SILENT]


def test_hosts_behind_one_switch_are_one_incident_and_one_decision() -> None:
    job, hosts = cluster(33, spares=32, domain="s7")
    bodies = [silent(f"h{number}", together=32) for number in range(1, 33)]
    outcome = round_(job, hosts, *bodies)
    (incident,) = outcome.incidents
    (decision,) = outcome.decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE and decision.action is not None
    assert len(decision.action.unreachable_hosts) == 32 and decision.action.stop_hosts == ("h0",)
    assert incident.state is IncidentState.ACTING


def test_the_others_that_fell_are_waited_for_when_sensors_find_it_one_after_the_other() -> None:
    job, hosts = cluster(5, spares=4, domain="s7")
    first = round_(job, hosts, silent("h1"), silent("h2"))
    (held,) = first.decisions
    assert (held.kind, held.rule) == (DecisionKind.HOLD, "wait_for_the_others_that_fell")
    assert held.evidence["unheard"] == "h3,h4"
    after = changed(hosts, first)
    (decision,) = round_(job, after, silent("h3"), silent("h4"), incidents=first.incidents).decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE and decision.action is not None
    assert decision.action.unreachable_hosts == ("h1", "h2", "h3", "h4")

    well = [msgspec.structs.replace(h, last_report_at=NOW) if h.host_id in ("h3", "h4") else h for h in after]
    (decision,) = round_(job, well, incidents=first.incidents, now=NOW + 0.5).decisions
    assert decision.action is not None and decision.action.unreachable_hosts == ("h1", "h2")
    late = round_(job, after, incidents=first.incidents, now=NOW + SETTINGS.root_cause_window_s)
    assert [d.kind for d in late.decisions] == [DecisionKind.MIGRATE_TO_SPARE]


def test_hosts_that_share_nothing_may_have_fallen_together_too() -> None:
    """Machines that were paused, or a cut to the supervisor alone: one is called silent moments before the other."""
    job, hosts = cluster(3, spares=2)
    paused = [msgspec.structs.replace(h, last_report_at=NOW - 3.7) if h.host_id in ("h0", "h2") else h for h in hosts]
    (held,) = round_(job, paused, silent("h1")).decisions
    assert (held.rule, held.evidence["unheard"]) == ("wait_for_the_others_that_fell", "h0,h2")


def test_hosts_that_are_back_are_given_a_moment_for_the_others_to_come_back_unless_their_workers_ended() -> None:
    job, hosts = cluster(3, spares=2, domain="s7")
    fell = round_(job, hosts, silent("h1"), silent("h2"))
    away = changed(hosts, fell)
    incidents = [msgspec.structs.replace(fell.incidents[0], state=IncidentState.DECIDING, action_id="")]
    later = NOW + 5.0
    well = {h.host_id: h if h.host_id == "h2" else msgspec.structs.replace(h, last_report_at=later) for h in away}
    well["h1"] = msgspec.structs.replace(well["h1"], state=HostState.HEALTHY, since=later)
    back = list(well.values())
    (held,) = round_(job, back, incidents=incidents, now=later).decisions
    assert (held.rule, held.evidence["away"]) == ("wait_for_the_others_that_return", "h2")
    exited = WorkerExited("job", 2, 1, 42, 1, None, 51)
    signal = Signal("h1", "i", 9, later, exited)
    seen = View((job,), tuple(back), tuple(incidents), (), (), 7, 70)
    (decision,) = decide(seen, [signal], SETTINGS, later).decisions
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE
