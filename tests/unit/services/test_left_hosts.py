"""Hosts that left in order: they are not missed and get no work, unless they still had ranks."""

from __future__ import annotations

import msgspec
from support.hosts.reports import report as made_report
from support.policy.checked import decide

from flyball.contracts.cluster import HostRanks, HostState, JobSpec, JobState, Phase
from flyball.contracts.reports.signals import HostReturned, HostSilent, Report
from flyball.contracts.wire import decode, encode
from services.controller.round.choices.spare_choice import free_hosts
from services.controller.round.view import GenerationView, HostView, JobView, PolicySettings, RankView, View
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.reports.report_decoding import ReportDecoder
from services.sensor.rules.vouches import Vouches

NOW = 10_000.0
SPEC = JobSpec(job="train", argv=("t.py",), workdir="/", nnodes=1, nproc_per_node=1)


def report(host_id: str, at: float, *, leaves: bool = False, incarnation: str = "one") -> Report:
    return made_report(host_id, at, incarnation=incarnation, interval_s=0.5, leaves=leaves)


def run_until(detector: FaultDetector, start: float, end: float, *reporting: str) -> list[object]:
    found: list[object] = []
    for tick in range(int((end - start) * 10)):
        now = start + tick / 10
        found += detector.tick(now)
        for host_id in reporting if tick % 5 == 0 else ():
            found += detector.observe(report(host_id, now), now)
    return found


def test_a_host_that_left_is_not_silent_and_may_come_back() -> None:
    detector = FaultDetector(DetectorSettings())
    assert not run_until(detector, 100.0, 110.0, "a", "b")
    assert not detector.observe(report("b", 110.0, leaves=True), 110.0)
    detector.leave("b")
    assert not run_until(detector, 110.0, 200.0, "a"), "it is not missed"
    assert not detector.observe(report("b", 200.0, incarnation="two"), 200.0), "it joins like any host"
    found = run_until(detector, 200.1, 260.0, "a")
    assert [type(body) for body in found] == [HostSilent], "from then on it is missed again"
    assert isinstance(detector.observe(report("b", 260.0, incarnation="two"), 260.0)[0], HostReturned)


def test_a_host_that_left_although_it_should_have_ranks_is_missed() -> None:
    detector = FaultDetector(DetectorSettings())
    run_until(detector, 100.0, 110.0, "a", "b")
    detector.leave("b")
    detector.expect("b", 110.0, report_ago_s=0.0)
    found = run_until(detector, 110.0, 170.0, "a")
    assert [body.host_id for body in found if isinstance(body, HostSilent)] == ["b"]


def test_a_farewell_survives_the_wire_both_ways_and_old_daemons_send_none() -> None:
    last = report("a", 1.0, leaves=True)
    assert decode(encode(last), Report).leaves
    decoder = ReportDecoder()
    assert [decoder.decode(encode(r), "a").leaves for r in (report("a", 1.0), last, report("a", 2.0))] == [
        False,
        True,
        False,
    ]
    said_before = {k: v for k, v in msgspec.to_builtins(last).items() if k != "leaves"}
    assert not decode(msgspec.json.encode(said_before), Report).leaves


def test_no_sensor_vouches_for_a_host_that_left() -> None:
    vouches = Vouches()
    vouches.note_report("a", 1.0)
    vouches.note_report("b", 1.0)
    assert vouches.take(1.0).hosts == ["a", "b"]
    vouches.leave("b")
    vouches.leave("never-heard-of")
    assert vouches.take(2.0).hosts == ["a"]


def host(host_id: str, **changes: object) -> HostView:
    fields = {
        "host_id": host_id,
        "state": HostState.HEALTHY,
        "since": NOW - 500,
        "address": "10.0.0.1",
        "failure_domain": "",
        "engine_address": "10.0.0.1:7",
        "free_port": 1,
        "last_report_at": NOW,
    }
    return HostView(**(fields | changes))


def test_it_gets_no_work() -> None:
    found = free_hosts([host("a"), host("b", left_at=NOW)], SPEC, taken=(), now=NOW, fresh_s=30.0)
    assert [free.host_id for free in found] == ["a"]


def view(*hosts: HostView) -> View:
    generation = GenerationView(
        generation=1,
        parent=None,
        lineage=(),
        hosts=(HostRanks("b", "10.0.0.1", "b:7", (0,)),),
        peers={},
        started_at=NOW - 100,
        restore_step=None,
        restart_count=0,
        ranks=(RankView(0, "b", 50, Phase.STEP, NOW - 1),),
    )
    job = JobView(
        spec=SPEC, state=JobState.RUNNING, submitted_at=NOW - 200, stop_requested=False, generation=generation
    )
    return View(jobs=(job,), hosts=hosts, incidents=(), actions=(), copies=(), next_incident=1, next_decision=1)


def test_ranks_still_on_it_are_moved_at_once() -> None:
    outcome = decide(view(host("a"), host("b", job="train", left_at=NOW - 1)), (), PolicySettings(), NOW)
    assert [(change.host_id, change.state) for change in outcome.hosts if change.host_id == "b"] == [
        ("b", HostState.SILENT)
    ]
    assert [incident.host_id for incident in outcome.incidents] == ["b"]


def test_one_without_ranks_is_left_alone() -> None:
    outcome = decide(view(host("b", job="train"), host("c", left_at=NOW - 1)), (), PolicySettings(), NOW)
    assert not outcome.hosts and not outcome.incidents
