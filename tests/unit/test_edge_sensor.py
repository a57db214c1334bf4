"""The sensor's queue, its writer, and what it knows to be committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostFacts
from flyball.contracts.errors import Unreachable
from flyball.contracts.signals import EngineStatus, PreemptionNotice, Report, Signal
from flyball.contracts.wire import WIRE_VERSION
from services.actuator.notify import AsyncWakeup
from services.controller.ports import Cursor, Delivered
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.sensor.committed import CommittedPositions
from services.sensor.report_queue import Received, ReportQueue
from services.sensor.report_writer import ReportWriter


def report(host_id: str, signals: tuple[Signal, ...] = ()) -> Report:
    facts = HostFacts(
        host_id=host_id,
        address="127.0.0.1",
        failure_domain="rack-1",
        engine_address="",
        free_port=1,
        daemon_version="0",
        pid=1,
    )
    return Report(
        version=WIRE_VERSION,
        incarnation=f"i-{host_id}",
        sent_at=0.0,
        interval_s=1.0,
        facts=facts,
        engine=EngineStatus(alive=True),
        signals=signals,
    )


def signal(host_id: str, seq: int = 1) -> Signal:
    return Signal(
        source=host_id, incarnation=f"i-{host_id}", seq=seq, at=0.0, body=PreemptionNotice(deadline_at=1.0, source="x")
    )


def received(host_id: str, *, size_bytes: int = 10, n_signals: int = 0) -> Received:
    signals = tuple(signal(host_id, seq) for seq in range(1, n_signals + 1))
    return Received(report=report(host_id, signals), signals=signals, size_bytes=size_bytes, at=0.0, at_monotonic_s=0.0)


def own_signal() -> Received:
    return Received(report=None, signals=(signal("sensor.x"),), size_bytes=0, at=0.0, at_monotonic_s=0.0)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.005)


class Bus:
    """A bus in memory that can be away, or find one host's signals indigestible."""

    def __init__(self) -> None:
        self.published: list[Signal] = []
        self.away = False
        self.refuses = ""
        self.attempts = 0

    def publish(self, signals: Sequence[Signal]) -> None:
        self.attempts += 1
        assert len(signals) <= 1000, "more than the bus would ever take at once"
        if self.away:
            raise Unreachable("away")
        if any(s.source == self.refuses for s in signals):
            raise ValueError("indigestible")
        self.published.extend(signals)

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        raise AssertionError("the sensor only publishes")

    def trim(self, upto: Cursor) -> None:
        raise AssertionError("the sensor only publishes")


class Status:
    def __init__(self, bus: Bus) -> None:
        self.hosts: list[str] = []
        self._bus = bus
        self.published_before: list[int] = []

    def record_reports(self, reports: Sequence[tuple[Report, float]]) -> None:
        self.published_before.append(len(self._bus.published))
        self.hosts.extend(r.facts.host_id for r, _ in reports)

    def committed(self, incarnations: Sequence[str]) -> dict[str, int]:
        return {}

    def hosts_with_placement(self) -> dict[str, float]:
        return {}


class Rig:
    def __init__(self, queue: ReportQueue) -> None:
        self.queue = queue
        self.bus = Bus()
        self.status = Status(self.bus)
        self.metrics = Metrics()
        self.writer = ReportWriter(
            queue=queue,
            bus=self.bus,
            status=self.status,
            wakeup=LocalWakeup(),
            clock=SystemClock(),
            metrics=self.metrics,
        )
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.writer.run, args=(self.stop,))

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def rig() -> Rig:
    return Rig(ReportQueue(max_items=8, max_size_bytes=1000))


def test_the_queue_is_bounded_by_number_and_bytes() -> None:
    queue = ReportQueue(max_items=2, max_size_bytes=100)
    assert queue.offer(received("a", size_bytes=60))
    assert not queue.offer(received("b", size_bytes=60))
    assert queue.offer(received("b", size_bytes=40))
    assert not queue.offer(received("c", size_bytes=0))
    assert queue.offer(own_signal()), "the sensor's own signals are never refused"
    assert [i.report.facts.host_id if i.report else "" for i in queue.take(max_items=9, timeout_s=0)] == ["a", "b", ""]
    assert queue.offer(received("d", size_bytes=100)), "what was taken makes room"


def test_signals_reach_the_bus_before_the_state_is_stored(rig: Rig) -> None:
    rig.thread.start()
    rig.queue.offer(received("a", n_signals=2))
    until(lambda: rig.status.hosts == ["a"])
    assert rig.status.published_before == [2]
    rig.end()


def test_an_absent_bus_delays_and_loses_nothing(rig: Rig) -> None:
    rig.bus.away = True
    rig.thread.start()
    rig.queue.offer(received("a", n_signals=1))
    rig.queue.offer(received("b"))
    until(lambda: rig.bus.attempts >= 2)
    assert not rig.status.hosts
    rig.bus.away = False
    until(lambda: rig.status.hosts == ["a", "b"])
    assert len(rig.bus.published) == 1
    rig.end()


def test_a_report_that_cannot_be_stored_does_not_hold_up_the_others(rig: Rig) -> None:
    rig.bus.refuses = "bad"
    for host_id in ("a", "bad", "c"):
        rig.queue.offer(received(host_id, n_signals=1))
    rig.thread.start()
    until(lambda: len(rig.status.hosts) == 3)
    assert [s.source for s in rig.bus.published] == ["a", "c"]
    assert rig.metrics.registry.get_sample_value("flyball_reports_dropped_total") == 1.0
    rig.end()


def test_spools_that_are_replayed_together_are_published_in_parts() -> None:
    rig = Rig(ReportQueue(max_items=8, max_size_bytes=1000))
    for host_id in "abcdef":
        assert rig.queue.offer(received(host_id, n_signals=400))
    rig.thread.start()
    until(lambda: len(rig.bus.published) == 2400)
    rig.end()
    assert rig.bus.attempts == 3
    assert [s.source for s in rig.bus.published[::400]] == list("abcdef")


def test_stopping_stores_what_was_received(rig: Rig) -> None:
    for number in range(5):
        rig.queue.offer(received(f"h{number}"))
    rig.stop.set()
    rig.thread.start()
    rig.end()
    assert len(rig.status.hosts) == 5


def test_stopping_does_not_wait_for_an_absent_database(rig: Rig) -> None:
    rig.bus.away = True
    rig.queue.offer(received("a", n_signals=1))
    rig.thread.start()
    until(lambda: rig.bus.attempts >= 1)
    rig.end()


def test_committed_positions_are_asked_for_only_while_something_is_outstanding() -> None:
    asked: list[list[str]] = []
    committed = {"i1": 2}

    def read(incarnations: Sequence[str]) -> dict[str, int]:
        asked.append(list(incarnations))
        return {i: committed[i] for i in incarnations if i in committed}

    async def scenario() -> None:
        wakeup = LocalWakeup()
        bell = AsyncWakeup(wakeup, "events")
        positions = CommittedPositions(read, SystemClock())
        task = asyncio.create_task(positions.run(bell))
        positions.expect("i1", 3)
        async with asyncio.timeout(10):
            while not positions.is_committed("i1", 2):
                await asyncio.sleep(0)
        assert not positions.is_committed("i1", 3)
        committed["i1"] = 3
        wakeup.notify("events")
        async with asyncio.timeout(10):
            while not positions.is_committed("i1", 3):
                await asyncio.sleep(0)
        assert positions.known(["i1", "i2"]) == {"i1": 3}
        n_asked = len(asked)
        positions.expect("i1", 3)  # a repeat of what is committed
        positions.expect("i9", 1)
        wakeup.notify("events")
        async with asyncio.timeout(10):
            while len(asked) == n_asked:
                await asyncio.sleep(0)
        assert all(question == ["i9"] for question in asked[n_asked:])
        task.cancel()

    asyncio.run(scenario())
