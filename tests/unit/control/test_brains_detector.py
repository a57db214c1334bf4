"""The fault detector: when it speaks, and when it must not."""

from __future__ import annotations

import msgspec
import pytest
from support.hosts.reports import report as made_report
from support.policy.detector_rig import TICK_S, DetectorRig

from flyball.contracts.reports.signals import (
    EngineStatus,
    HostReturned,
    HostSilent,
    PeerUnreachable,
    Report,
    Signal,
)
from services.sensor.detector import host_silence
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector


def report(host: str, now: float, unreachable: tuple[str, ...] = ()) -> Report:
    return made_report(host, now, engine=EngineStatus(alive=True, unreachable_peers=unreachable))


class ReportingRig(DetectorRig):
    """Hosts that report each second, in one detector."""

    def __init__(self, *hosts: str, settings: DetectorSettings | None = None) -> None:
        super().__init__(settings or DetectorSettings())
        self.reporting = {host: () for host in hosts}

    def reports(self) -> list[Report]:
        return [report(host, self.now, unreachable) for host, unreachable in self.reporting.items()]

    def silent(self) -> list[tuple[float, HostSilent]]:
        return [(at, body) for at, body in self.signals if isinstance(body, HostSilent)]


def test_a_witness_makes_it_quick() -> None:
    hosts = ReportingRig("a", "b")
    hosts.run(10)
    del hosts.reporting["b"]
    hosts.reporting["a"] = ("b",)
    stopped_at = hosts.now
    hosts.run(20)
    ((at, body),) = hosts.silent()
    assert body.host_id == "b" and body.witnesses == ("a",)
    assert 2.9 < at - stopped_at < 3.3  # three intervals
    assert [b for _, b in hosts.signals if isinstance(b, PeerUnreachable)] == [
        PeerUnreachable("b", "The engine of a lost b and cannot reconnect.")
    ]


def test_without_a_witness_it_takes_three_times_as_long() -> None:
    hosts = ReportingRig("a", "b")
    hosts.run(10)
    del hosts.reporting["b"]
    stopped_at = hosts.now
    hosts.run(20)
    ((at, body),) = hosts.silent()
    assert body.witnesses == () and 8.9 < at - stopped_at < 9.3


def test_when_nobody_is_heard_of_it_takes_longest() -> None:
    hosts = ReportingRig("a", "b", "c")
    hosts.run(10)
    hosts.reporting.clear()
    stopped_at = hosts.now
    hosts.run(30)
    assert {body.host_id for _, body in hosts.silent()} == {"a", "b", "c"}
    assert all(14.9 < at - stopped_at < 15.3 for at, _ in hosts.silent())


def test_yellow_comes_before_red() -> None:
    hosts = ReportingRig("a", "b")
    hosts.run(10)
    assert hosts.detector.suspicion() == ()
    del hosts.reporting["b"]
    hosts.run(2)
    (suspect,) = hosts.detector.suspicion()
    assert suspect.host_id == "b" and not suspect.is_silent and not hosts.silent()
    hosts.run(10)
    (silent,) = hosts.detector.suspicion()
    assert silent.is_silent


def test_a_host_returns_once() -> None:
    hosts = ReportingRig("a", "b")
    hosts.run(10)
    del hosts.reporting["b"]
    hosts.run(20)
    hosts.reporting["b"] = ()
    hosts.run(10)
    returned = [body for _, body in hosts.signals if isinstance(body, HostReturned)]
    assert len(returned) == 1 and 20.0 <= returned[0].away_s <= 21.1
    assert len(hosts.silent()) == 1


def test_its_own_lag_does_not_count() -> None:
    hosts = ReportingRig("a", "b")
    hosts.run(10)
    hosts.now += 30.0  # the sensor's loop stood still; reports wait unread
    hosts.keep(hosts.detector.tick(hosts.now))
    assert not hosts.silent()
    assert hosts.detector.forgiven_s == pytest.approx(29.9, abs=0.2)
    hosts.run(20)
    assert not hosts.silent()


def test_an_irregular_host_gets_a_longer_deadline() -> None:
    detector = FaultDetector(DetectorSettings())
    now, last = 100.0, 100.0
    gaps = [1.0, 1.0, 4.0, 1.0, 1.0, 3.5, 1.0, 1.0, 4.0]
    for gap in gaps * 3:
        while now < last + gap - 1e-9:
            now = round(now + TICK_S, 6)
            assert not detector.tick(now), "an irregular host is not a silent one"
        detector.observe(report("a", now), now)
        last = now


def test_an_expected_host_that_never_reports_is_silent() -> None:
    hosts = ReportingRig("a")
    hosts.detector.expect("ghost", hosts.now, report_ago_s=60.0)
    hosts.run(40)
    ((at, body),) = hosts.silent()
    assert body.host_id == "ghost" and 29.0 < at - 100.0 < 31.0


def test_a_host_that_reports_to_another_sensor_is_silent_only_once_it_does_so_no_more() -> None:
    hosts = ReportingRig("a")
    for _ in range(60):
        hosts.detector.expect("elsewhere", hosts.now, report_ago_s=0.5)
        hosts.run(1)
    assert not hosts.silent()
    died_at = hosts.now
    for second in range(40):
        hosts.detector.expect("elsewhere", hosts.now, report_ago_s=0.5 + second)
        hosts.run(1)
    ((at, body),) = hosts.silent()
    assert body.host_id == "elsewhere" and 28.0 < at - died_at < 32.0
    hosts.detector.expect("elsewhere", hosts.now, report_ago_s=0.5)  # it is back, there
    assert not hosts.detector.suspicion()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_silence, "MAX_HOSTS", 50)
    detector = FaultDetector(DetectorSettings())
    for number in range(1000):
        now = 100.0 + number * 0.05
        detector.observe(report(f"host-{number}", now, unreachable=("x", f"host-{number + 1}")), now)
    assert len(detector._silence) == 50
    assert len(detector._silence._witnesses) <= 100


def test_a_repeated_report_is_a_sign_of_life_and_nothing_more() -> None:
    detector = FaultDetector(DetectorSettings())
    first = report("a", 100.0, unreachable=("b",))
    assert len(detector.observe(first, 100.0)) == 1
    assert detector.observe(first, 100.1) == []
    older = msgspec.structs.replace(first, sent_at=99.0, engine=EngineStatus(alive=True))
    assert detector.observe(older, 100.2) == []
    assert detector.observe(report("a", 101.0, unreachable=("b",)), 101.0) == []  # still the same episode


def test_time_in_which_nobody_could_be_heard_does_not_count_however_often() -> None:
    detector = FaultDetector(DetectorSettings())
    moments = (100.0, 100.1, 100.2, 110.3, 110.4, 110.64, 110.9, 116.26, 115.0, 116.36)
    forgiven = []
    for now in moments:
        detector.tick(now)
        forgiven.append(round(detector.forgiven_s, 3))
    assert forgiven == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.16, 15.42, 15.42, 15.42], "a delay below 0.15 s is none"


def test_what_is_known_of_a_host_that_left_is_dropped() -> None:
    detector = FaultDetector(DetectorSettings())
    assert detector.observe(report("a", 100.0, unreachable=("b", "a")), 100.0) == [
        PeerUnreachable("b", "The engine of a lost b and cannot reconnect.")
    ]
    assert len(detector._peers) == 1
    detector.leave("a")
    assert len(detector._peers) == 0
    assert len(detector.observe(report("a", 101.0, unreachable=("b",)), 101.0)) == 1, "it is another episode"
    assert detector.observe(report("a", 102.0), 102.0) == [] and len(detector._peers) == 0
    assert len(detector.observe(report("a", 103.0, unreachable=("b",)), 103.0)) == 1, "and another"
    known = Signal("a", "i1", 1, 104.0, PeerUnreachable("c", "The daemon reports it."))
    also = msgspec.structs.replace(report("a", 104.0, unreachable=("b", "c")), signals=(known,))
    assert detector.observe(also, 104.0) == []
