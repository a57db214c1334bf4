"""What is stored first, and at what pace: who is new or in trouble within half a second, everybody within ten."""

from __future__ import annotations

from math import inf

import pytest

from flyball.contracts.cluster import HostFacts
from flyball.contracts.reports.signals import EngineStatus, Report
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.reports.report_writer import MAX_STEADY
from services.sensor.reports.state_lanes import Received
from services.sensor.reports.storing_pace import MAX_SHARE, StoringPace
from services.sensor.rules.slots import slot_of

STEADY = [f"steady-{number}" for number in range(1_000)]


def received(host_id: str, at_s: float) -> Received:
    report = Report(
        version=WIRE_VERSION,
        incarnation="i",
        sent_at=at_s,
        interval_s=1.0,
        facts=HostFacts(host_id, "10.0.0.1", "rack", "", 29_500, "0.1.0", 1),
        engine=EngineStatus(alive=True),
    )
    return Received(report, (), 10, at_s, at_s)


@pytest.fixture
def queue() -> ReportQueue:
    """A thousand steady hosts wait."""
    queue = ReportQueue(max_items=10_000, max_size_bytes=1 << 30)
    queue.note_stored(STEADY)
    for number, host_id in enumerate(STEADY):
        assert queue.offer(received(host_id, number / 1000))
    return queue


def taken(queue: ReportQueue, *, max_hosts: int = 0, max_steady: int = 0) -> list[str]:
    batch = queue.take(max_hosts=max_hosts, max_steady=max_steady, timeout_s=0.0)
    return [item.report.facts.host_id for item in (*batch.reports, *batch.steady) if item.report]


def test_new_hosts_and_those_in_trouble_wait_behind_no_steady_ones(queue: ReportQueue) -> None:
    queue.offer(received("new", 5.0))
    assert taken(queue, max_hosts=128) == ["new"]
    queue.trouble(("steady-500",))
    queue.offer(received("new-2", 6.0))
    assert queue.oldest().pressed_s == 0.5, "since it has waited, not since it is in trouble"
    assert taken(queue, max_hosts=128) == ["steady-500", "new-2"]
    queue.offer(received("steady-500", 7.0))
    assert taken(queue, max_hosts=128) == ["steady-500"], "it still is"
    queue.trouble(())
    queue.note_stored(("new",))
    queue.offer(received("steady-500", 8.0))
    queue.offer(received("new", 8.0))
    assert taken(queue, max_hosts=128) == []


def test_each_lane_leaves_places_to_those_behind_it() -> None:
    queue = ReportQueue(max_items=100, max_size_bytes=1 << 30)
    queue.trouble([f"troubled-{number}" for number in range(9)])
    for number in range(9):
        queue.offer(received(f"new-{number}", 1.0))
        queue.offer(received(f"troubled-{number}", 2.0))
    assert taken(queue, max_hosts=4) == ["troubled-0", "troubled-1", "new-0", "troubled-2"]


def test_steady_hosts_are_taken_by_whole_slots_the_oldest_first(queue: ReportQueue) -> None:
    first = taken(queue, max_steady=100)
    slots = {slot_of(host_id) for host_id in first}
    assert "steady-0" in first and 60 < len(first) <= 100
    assert set(first) == {host_id for host_id in STEADY if slot_of(host_id) in slots}
    for host_id in first:
        queue.offer(received(host_id, 2.0))
    assert not set(first) & set(taken(queue, max_steady=500)), "they wait behind the others now"
    while part := taken(queue, max_steady=MAX_STEADY):
        last = part
    assert set(first) & set(last)
    assert (len(queue), queue.oldest().steady_s) == (0, inf)


def test_a_host_waits_since_its_first_report_that_is_not_stored(queue: ReportQueue) -> None:
    for at_s in (5.0, 6.0):
        for host_id in STEADY:
            queue.offer(received(host_id, at_s))
    assert queue.oldest().steady_s == 0.0
    items = queue.take(max_hosts=0, max_steady=10_000, timeout_s=0.0).steady
    assert {item.at_monotonic_s for item in items} == {6.0}
    assert max(item.waits_since_s for item in items) < 1.0


def storing(*, cost_s: float, per_s: float, wall_per_cost: float, seconds: float = 600.0) -> tuple[float, float]:
    """Parts come at `per_s`, and each takes `cost_s` of a core, within `wall_per_cost` times as long. Return the oldest
    age at which one was stored in the last third, and the share of a core."""
    pace = StoringPace(within_s=10.0, share=1 / 32)
    now_s, stored, worst_s, worked_s = 0.0, 0, 0.0, 0.0
    while now_s < seconds:
        since_s = stored / per_s
        opens_s = max(since_s, pace.opens_s(since_s))
        now_s = max(now_s, opens_s) + cost_s * wall_per_cost
        if now_s > 2 / 3 * seconds:
            worst_s = max(worst_s, now_s - since_s)
        worked_s += cost_s
        stored += 1
        pace.worked(cost_s, now_s)
    return worst_s, worked_s / now_s


@pytest.mark.parametrize("wall_per_cost", [1.0, 5.0])
def test_state_is_stored_in_time_however_long_its_own_thread_waits_for_a_core(wall_per_cost: float) -> None:
    worst_s, share = storing(cost_s=0.01, per_s=10.0, wall_per_cost=wall_per_cost)
    assert worst_s < 10.0
    assert share == pytest.approx(0.1, rel=0.1), "more than its share, because there is so much"


def test_little_state_takes_little_time_and_is_fresh() -> None:
    worst_s, share = storing(cost_s=0.001, per_s=20.0, wall_per_cost=1.0)
    assert worst_s < 0.1
    assert share == pytest.approx(0.02, rel=0.1)


def test_however_late_it_is_the_event_loop_has_its_share() -> None:
    pace = StoringPace(within_s=10.0, share=1 / 32)
    assert pace.opens_s(inf) == -inf, "nothing was stored yet"
    pace.worked(0.2, 100.0)
    assert pace.opens_s(99.9) == 100.0 + 5.0 - 0.1
    assert pace.opens_s(inf) == 100.0 + 0.2 * 31
    assert pace.opens_s(0.0) == 100.0 + 0.2 * (1 / MAX_SHARE - 1)
