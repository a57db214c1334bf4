"""Never red while reports come on time; always red within a bound after they stop; never more memory than allowed."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.cluster import HostFacts
from flyball.contracts.reports.signals import EngineStatus, HostReturned, HostSilent, Report
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.detector import host_silence
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector

TICK_S = 0.1


def report(host: str, now: float, interval_s: float, unreachable: tuple[str, ...] = ()) -> Report:
    facts = HostFacts(host, "ip", "rack", "ip:1", 1, "1", 1)
    return Report(
        version=WIRE_VERSION,
        incarnation="i1",
        sent_at=now,
        interval_s=interval_s,
        facts=facts,
        engine=EngineStatus(alive=True, unreachable_peers=unreachable),
    )


intervals = st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0, 5.0])


@settings(max_examples=25, deadline=None)
@given(intervals, st.lists(st.floats(0.1, 2.5), min_size=5, max_size=20), st.booleans())
def test_silence_is_found_within_a_bound_and_never_before(
    interval_s: float, jitter: list[float], witness: bool
) -> None:
    detector = FaultDetector(DetectorSettings())
    now = 50.0

    def let_pass(seconds: float, unreachable: tuple[str, ...] = ()) -> list[HostSilent]:
        nonlocal now
        found, until = [], now + seconds
        while now < until:
            now += TICK_S
            found += detector.observe(report("w", now, TICK_S, unreachable), now)
            found += detector.tick(now)
        return [body for body in found if isinstance(body, HostSilent)]

    for factor in jitter:  # on time: within 2.5 intervals
        detector.observe(report("h", now, interval_s), now)
        assert let_pass(factor * interval_s - TICK_S) == [], "red though reports come on time"
    stopped_at = now
    silent = let_pass(100.0, ("h",) if witness else ())
    assert [body.host_id for body in silent] == ["h"]
    assert silent[0].witnesses == (("w",) if witness else ())
    longest = max(30.0, 3 * interval_s) * (1 if witness else 3)
    assert silent[0].silent_s <= longest + 2.5 * interval_s + 2 * TICK_S
    assert silent[0].silent_s >= min(0.6, interval_s) and now > stopped_at
    returned = detector.observe(report("h", now, interval_s), now)
    assert [type(body) for body in returned] == [HostReturned]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.3, 60.0), min_size=1, max_size=20))
def test_a_sensor_that_sleeps_accuses_nobody(naps: list[float]) -> None:
    detector = FaultDetector(DetectorSettings())
    now = 10.0
    for nap in naps:
        for host in ("a", "b"):
            detector.observe(report(host, now, 1.0), now)
        for _ in range(5):
            now += TICK_S
            assert detector.tick(now) == []
        now += nap  # nobody called it, so nobody read reports either
        assert detector.tick(now) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.sets(st.integers(0, 200), max_size=3)), max_size=200))
def test_memory_is_bounded_whoever_reports_what(reports: list[tuple[int, set[int]]]) -> None:
    detector = FaultDetector(DetectorSettings())
    now = 10.0
    for number, named in reports:
        now += 0.05
        with patch.object(host_silence, "MAX_HOSTS", 20):
            detector.observe(report(f"h{number}", now, 1.0, tuple(f"h{n}" for n in sorted(named))), now)
        detector.tick(now)
        assert len(detector._silence) <= 20
        assert len(detector._peers) <= 20
        assert len(detector._silence._witnesses) <= 60
