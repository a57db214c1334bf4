"""Hosts that fall silent together come together: none before it is due, none late beyond a bound, none twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.cluster import HostFacts
from flyball.contracts.reports.signals import EngineStatus, HostSilent, Report
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.detector.correlation import Fall, due_groups, groups_of
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector

TICK_S = 0.1

falls = st.lists(
    st.builds(
        lambda domain, seen_s, interval_s, patience_s: (domain, seen_s, interval_s, seen_s + patience_s),
        st.sampled_from(["", "s1", "s2"]),
        st.floats(0.0, 20.0),
        st.sampled_from([0.2, 1.0, 5.0]),
        st.floats(0.1, 20.0),
    ),
    max_size=12,
).map(lambda rows: [Fall(f"h{number:02}", *row) for number, row in enumerate(rows)])


@settings(max_examples=100, deadline=None)
@given(falls)
def test_everyone_who_is_due_comes_once_and_within_a_bound(waiting: list[Fall]) -> None:
    left = {fall.host_id: fall for fall in waiting}
    for tick in range(500):
        now_s = tick * TICK_S
        for group in due_groups(list(left.values()), now_s):
            came = [left.pop(host_id) for host_id in group.host_ids]
            assert all(fall.due_s <= now_s for fall in came)
            first = min(fall.due_s for fall in came)
            assert now_s <= first + 1.0 + 5.0 + TICK_S
            domains = {fall.domain for fall in came}
            assert group.domain == (came[0].domain if len(came) > 1 and len(domains) == 1 else "")
            last_seen = [fall.last_seen_s for fall in came]
            assert group.within_s == max(last_seen) - min(last_seen)
    assert not left


@given(falls)
def test_groups_part_the_hosts_and_keep_together_who_fell_together(waiting: list[Fall]) -> None:
    groups = groups_of(waiting, 1.0)
    assert sorted(fall.host_id for group in groups for fall in group) == [fall.host_id for fall in waiting]
    number_of = {fall.host_id: number for number, group in enumerate(groups) for fall in group}
    for one in waiting:
        for other in waiting:
            apart_s = abs(one.last_seen_s - other.last_seen_s)
            if apart_s <= min(one.interval_s, other.interval_s) or (
                one.domain and one.domain == other.domain and apart_s <= 1.0
            ):
                assert number_of[one.host_id] == number_of[other.host_id]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=2, max_size=12),
    st.sampled_from([0.2, 1.0, 5.0]),
    st.data(),
)
def test_a_rack_falls_at_once_whenever_its_hosts_reported_last(
    phases: list[float], interval_s: float, data: st.DataObject
) -> None:
    detector = FaultDetector(DetectorSettings())
    rack = [f"r{number:02}" for number in range(len(phases))]
    accused = data.draw(st.lists(st.sampled_from(rack), unique=True))
    now, cut_at = 50.0, 50.0 + 5 * interval_s
    next_report = {name: now + phase * interval_s for name, phase in zip(rack, phases, strict=True)}
    silent: list[tuple[float, HostSilent]] = []
    outside = 0.0
    while now < cut_at + 20 * interval_s + 5.0:
        now += TICK_S
        found = detector.tick(now)
        for name in rack:
            if next_report[name] <= now < cut_at:
                found += detector.observe(_report(name, "s7", now, interval_s), now)
                next_report[name] += interval_s
        if now >= outside:
            for name in ("x", "y", "z"):
                words = tuple(accused) if now > cut_at else ()
                found += detector.observe(_report(name, name, now, interval_s, words), now)
            outside = now + interval_s
        silent += [(now, body) for body in found if isinstance(body, HostSilent)]
    assert sorted(body.host_id for _, body in silent) == rack
    assert len({at for at, _ in silent}) == 1
    assert {body.together for _, body in silent} == {len(rack)}


def _report(name: str, domain: str, now: float, interval_s: float, accused: tuple[str, ...] = ()) -> Report:
    facts = HostFacts(name, "ip", domain, "ip:1", 1, "1", 1)
    return Report(
        version=WIRE_VERSION,
        incarnation="i1",
        sent_at=now,
        interval_s=interval_s,
        facts=facts,
        engine=EngineStatus(True, accused),
    )
