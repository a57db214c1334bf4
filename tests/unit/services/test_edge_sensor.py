"""The sensor's queue and its writer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.reports import report as made_report

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Unreachable
from flyball.contracts.reports.signals import PreemptionNotice, RankMarks, Report, Sender, Signal
from services.rules.stream import Cursor, Delivered
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.sensor.reports import report_writer
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.reports.report_writer import ReportWriter
from services.sensor.reports.state_lanes import Received
from services.sensor.rules.step_log import StepSummary


def report(host_id: str, signals: tuple[Signal, ...] = ()) -> Report:
    return made_report(host_id, 0.0, incarnation=f"i-{host_id}", signals=signals)


def signal(host_id: str, seq: int = 1) -> Signal:
    return Signal(
        source=host_id, incarnation=f"i-{host_id}", seq=seq, at=0.0, body=PreemptionNotice(deadline_at=1.0, source="x")
    )


def received(host_id: str, *, size_bytes: int = 10, n_signals: int = 0) -> Received:
    signals = tuple(signal(host_id, seq) for seq in range(1, n_signals + 1))
    return Received(report=report(host_id, signals), signals=signals, size_bytes=size_bytes, at=0.0, at_monotonic_s=0.0)


def own_signal() -> Received:
    return Received(report=None, signals=(signal("sensor.x"),), size_bytes=0, at=0.0, at_monotonic_s=0.0)


class Bus:
    """A bus in memory that can be away, or fail on one host's signals."""

    def __init__(self) -> None:
        self.published: list[Signal] = []
        self.away = False
        self.refuses = ""
        self.attempts = 0

    def publish(self, signals: Sequence[Signal]) -> None:
        self.attempts += 1
        assert len(signals) <= 1000, "more than the bus would ever accept at once"
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
    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.begun = 0
        self.refuses = ""  # a job whose steps cannot be stored
        self.steps: list[str] = []
        self.may_store = threading.Event()
        self.may_store.set()

    def vouch(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None:
        raise AssertionError("the writer does not vouch")

    def record_reports(self, reports: Sequence[tuple[Report, float]], steps: Sequence[StepSummary] = ()) -> None:
        self.begun += 1
        assert self.may_store.wait(60.0)
        if any(summary.job == self.refuses for summary in steps):
            raise ValueError("indigestible")
        self.steps.extend(summary.job for summary in steps)
        self.hosts.extend(r.facts.host_id for r, _ in reports)

    def record_steady(self, reports: Sequence[tuple[Report, float]]) -> None:
        self.record_reports(reports)

    def committed(self, senders: Sequence[Sender]) -> dict[Sender, int]:
        return {}

    def expected_hosts(self) -> dict[str, float]:
        return {}


class Rig:
    def __init__(self, queue: ReportQueue) -> None:
        self.queue = queue
        self.bus = Bus()
        self.status = Status()
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
        self.queue.release()
        self.thread.join(60.0)
        assert not self.thread.is_alive()


@pytest.fixture
def rig() -> Rig:
    return Rig(ReportQueue(max_items=8, max_size_bytes=1000))


def take(queue: ReportQueue) -> tuple[list[str], list[str]]:
    """The hosts of the signals, and of the reports."""
    batch = queue.take(max_hosts=9, timeout_s=0.0)
    return [i.signals[0].source for i in batch.signals], [i.report.facts.host_id for i in batch.reports if i.report]


def test_the_queue_is_bounded_by_number_and_bytes() -> None:
    queue = ReportQueue(max_items=2, max_size_bytes=100)
    assert queue.offer(received("a", size_bytes=60))
    assert not queue.offer(received("b", size_bytes=60))
    assert queue.offer(received("b", size_bytes=40, n_signals=1))
    assert queue.offer(received("b", size_bytes=40, n_signals=2))
    assert not queue.offer(received("b", size_bytes=40, n_signals=3)), "signals are not dropped for newer ones"
    assert queue.offer(own_signal()), "the sensor's own signals are never refused"
    assert take(queue) == (["b", "sensor.x", "b"], ["b", "a"])
    assert queue.offer(received("d", size_bytes=100)), "removed items make room"


def flood(seq: int, size_bytes: int) -> Received:
    new = (signal("flood", seq),)
    return Received(report("flood", new), new, size_bytes, 0.0, 0.0)


def test_a_host_that_floods_fills_its_own_room_and_delays_others_by_one_report() -> None:
    queue = ReportQueue(max_items=1_000, max_size_bytes=64 << 20, max_host_bytes=8 << 20)
    taken = [queue.offer(flood(seq, 1 << 20)) for seq in range(1, 100)]
    assert taken == [True] * 8 + [False] * 91
    assert queue.offer(received("quiet", n_signals=1))
    whose = [[item.signals[0].source for item in queue.take(max_hosts=0, timeout_s=0.0).signals] for _ in range(2)]
    assert "quiet" in whose[0] + whose[1]
    assert max(len(sources) for sources in whose) <= 2
    assert queue.offer(flood(100, 1 << 20)), "removed items make room"
    assert queue.offer(own_signal())


def test_the_bytes_of_signals_that_wait_are_bounded_also_when_their_state_was_taken() -> None:
    queue = ReportQueue(max_items=1_000, max_size_bytes=16 << 20, max_host_bytes=8 << 20)
    for seq in range(1, 100):
        for host in "abcdef":
            new = (signal(host, seq),)
            queue.offer(Received(report(host, new), new, 1 << 20, 0.0, 0.0))
        queue.take(max_hosts=99, timeout_s=0.0, with_signals=False)
    waiting = 0
    while batch := queue.take(max_hosts=0, timeout_s=0.0):
        waiting += sum(item.size_bytes for item in batch.signals)
    assert waiting == 16 << 20


def test_many_small_reports_of_one_host_leave_room_for_others() -> None:
    queue = ReportQueue(max_items=100, max_size_bytes=64 << 20, max_host_items=20)
    assert sum(queue.offer(flood(seq, 100)) for seq in range(1, 100)) == 20
    assert queue.offer(received("quiet", n_signals=1))
    assert [item.signals[0].source for item in queue.take(max_hosts=0, timeout_s=0.0).signals][:2] == ["flood", "quiet"]


def test_of_a_hosts_state_the_newest_waits_and_what_is_reported_once_stays() -> None:
    queue = ReportQueue(max_items=2, max_size_bytes=100)
    mark = RankMarks("job", 1, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for number in range(9):
        item = received("a", size_bytes=30)
        assert item.report is not None
        marks = (mark,) if number in (3, 5) else ()
        changed = msgspec.structs.replace(item.report, sent_at=float(number), marks=marks)
        assert queue.offer(msgspec.structs.replace(item, report=changed))
        assert queue.offer(received("b", size_bytes=10))
    assert not queue.take(max_hosts=0, timeout_s=0.0)
    first = queue.take(max_hosts=1, timeout_s=0.0)
    assert [item.report.sent_at for item in first.reports if item.report] == [3.0, 5.0, 8.0]
    assert take(queue) == ([], ["b"])
    assert not queue.take(max_hosts=9, timeout_s=0.0)


def test_the_state_of_hosts_that_report_more_than_their_state_goes_first() -> None:
    queue = ReportQueue(max_items=9, max_size_bytes=1000)
    mark = RankMarks("job", 1, 0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for host in "abcd":
        item = received(host)
        assert item.report is not None
        changed = msgspec.structs.replace(item.report, marks=(mark,) if host == "c" else ())
        assert queue.offer(msgspec.structs.replace(item, report=changed))
    first = queue.take(max_hosts=2, timeout_s=0.0)
    assert [item.report.facts.host_id for item in first.reports if item.report] == ["c", "a"]
    assert take(queue) == ([], ["b", "d"])
    queue.offer(received("c"))
    queue.offer(received("a"))
    assert take(queue) == ([], ["c", "a"]), "once"
    for host in ("quiet", "x", "y", "z"):
        queue.offer(received(host, n_signals=0 if host == "quiet" else 1))
    first = queue.take(max_hosts=2, timeout_s=0.0)
    assert [item.report.facts.host_id for item in first.reports if item.report] == ["x", "quiet"], "nobody starves"


def test_signals_wait_for_no_state_that_is_being_stored(rig: Rig) -> None:
    rig.status.may_store.clear()
    rig.thread.start()
    rig.queue.offer(received("slow"))
    until(lambda: rig.status.begun == 1)
    rig.queue.offer(received("a", n_signals=2))
    until(lambda: len(rig.bus.published) == 2)
    assert rig.status.hosts == []
    rig.status.may_store.set()
    until(lambda: rig.status.hosts == ["slow", "a"])
    rig.end()


def test_an_absent_bus_delays_signals_loses_none_and_holds_no_state_up(rig: Rig) -> None:
    rig.bus.away = True
    rig.thread.start()
    rig.queue.offer(received("a", n_signals=1))
    until(lambda: rig.bus.attempts >= 2)
    for _ in range(5):
        rig.queue.offer(received("b", n_signals=2))
    until(lambda: set(rig.status.hosts) == {"a", "b"})
    attempts = rig.bus.attempts
    until(lambda: rig.bus.attempts > attempts)
    assert not rig.bus.published
    rig.bus.away = False
    until(lambda: len(rig.bus.published) == 3)
    assert [s.source for s in rig.bus.published] == ["a", "b", "b"]
    rig.end()


def test_signals_that_are_sent_again_while_they_wait_wait_once() -> None:
    queue = ReportQueue(max_items=2, max_size_bytes=1000)
    for _ in range(50):  # its daemon sends them again every second
        assert queue.offer(received("a", n_signals=3))
        assert queue.offer(own_signal())
    assert sum(len(item.signals) for item in queue.take(max_hosts=0, timeout_s=0.0).signals) == 4
    assert queue.offer(received("a", n_signals=3)), "what was removed may be lost, and arrives again"
    assert len(queue.take(max_hosts=9, timeout_s=0.0).signals) == 1


def test_a_report_that_cannot_be_stored_does_not_hold_up_the_others(rig: Rig) -> None:
    rig.bus.refuses = "bad"
    for host_id in ("a", "bad", "c"):
        rig.queue.offer(received(host_id, n_signals=1))
    rig.thread.start()
    until(lambda: len(rig.status.hosts) == 3)
    until(lambda: [s.source for s in rig.bus.published] == ["a", "c"])
    assert rig.metrics.registry.get_sample_value("flyball_reports_dropped_total") == 1.0
    rig.end()


def test_steps_that_cannot_be_stored_hold_up_neither_others_nor_the_reports(rig: Rig) -> None:
    rig.status.refuses = "bad"
    jobs = ("a", "bad", "c")
    rig.queue.offer_steps([StepSummary(job, 1, 1.0, 0, (1.0,), 0, 1, "s") for job in jobs])
    rig.queue.offer(received("host"))
    rig.thread.start()
    until(lambda: rig.status.hosts == ["host"])
    assert rig.status.steps == ["a", "c"]
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


def test_stopping_stores_no_state_beside_the_thread_that_still_does(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_writer, "LONGEST_END_S", 0.01)
    rig.status.may_store.clear()
    rig.queue.offer(received("slow"))
    rig.thread.start()
    until(lambda: rig.status.begun == 1)
    rig.bus.away = True
    rig.queue.offer(received("a", n_signals=1))
    until(lambda: rig.bus.attempts >= 1)
    rig.bus.away = False
    rig.end()
    assert [s.source for s in rig.bus.published] == ["a"]
    assert rig.status.begun == 1
    rig.status.may_store.set()
    until(lambda: rig.status.hosts == ["slow"])


def test_stopping_does_not_wait_for_an_absent_database(rig: Rig) -> None:
    rig.bus.away = True
    rig.queue.offer(received("a", n_signals=1))
    rig.thread.start()
    until(lambda: rig.bus.attempts >= 1)
    rig.end()
