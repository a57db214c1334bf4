"""What a sensor does with reports that it accepts, and with those that it refuses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.clocks.manual import ManualClock
from support.hosts.reports import report as made_report
from support.servers.ingests import make_ingest

from flyball.contracts.errors import Unreachable
from flyball.contracts.reports.signals import (
    EngineRestarted,
    HostReturned,
    HostSilent,
    Report,
    Sender,
    Signal,
)
from flyball.contracts.wire import WIRE_VERSION, encode
from services.api.hot_path import ReportDesk
from services.runtime.http.auth import Authenticator
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import AsyncWakeup, LocalWakeup
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.reports.committed import CommittedPositions
from services.sensor.reports.report_queue import ReportQueue


def report(host_id: str) -> Report:
    return made_report(host_id, 0.0, incarnation=f"i-{host_id}")


def test_a_signal_of_the_sensor_is_published_again_until_it_is_committed() -> None:
    clock = ManualClock(1_000_000.0)
    queue = ReportQueue(max_items=1000, max_size_bytes=1_000_000)
    stored: dict[Sender, int] = {}
    committed = CommittedPositions(lambda _: dict(stored), clock)
    detector = FaultDetector(DetectorSettings())
    ingest = make_ingest(queue, clock, detector=detector, committed=committed)
    detector.set_neighbours({"b": ("a",)})
    asked: list[tuple[str, ...]] = []
    published: list[Signal] = []

    def let_pass(seconds: int, *hosts: str) -> None:
        for _ in range(seconds):
            for host_id in hosts:
                present = msgspec.structs.replace(report(host_id), sent_at=clock.now_s)
                asked.append(ingest.accept(present, host_id=host_id, size_bytes=10).ask)
            for _ in range(10):
                clock.now_s += 0.1
                ingest.tick(clock.now_s)
            for item in queue.take(max_hosts=1000, timeout_s=0.0).signals:
                published.extend(signal for signal in item.signals if item.report is None)

    let_pass(10, "a", "b")
    assert not any(asked)
    let_pass(10, "a")
    assert asked[-1] == ("b",), "the reply asks its neighbour"
    (silent,) = published
    assert isinstance(silent.body, HostSilent) and (silent.source, silent.seq) == ("sensor.s", 1)
    let_pass(10, "a")  # everything on the bus is lost
    assert published == [silent] * 3
    stored["sensor.s", "i1"] = 1

    async def look() -> None:
        looking = asyncio.create_task(committed.run(AsyncWakeup(LocalWakeup(), "events")))
        while not committed.is_committed(silent):
            await asyncio.sleep(0)
        looking.cancel()

    asyncio.run(asyncio.wait_for(look(), 120))
    let_pass(30, "a")
    assert published == [silent] * 3


def test_a_sensor_whose_database_is_away_doubts_that_a_host_is_silent() -> None:
    """Another sensor may have its reports, which only the database would tell."""

    class Detector(FaultDetector):
        doubted = asyncio.Event()

        def doubt(self, now_s: float, for_s: float) -> None:
            super().doubt(now_s, for_s)
            self.doubted.set()

    clock = ManualClock(1_000_000.0)
    queue = ReportQueue(max_items=1000, max_size_bytes=1_000_000)
    detector = Detector(DetectorSettings())
    ingest = make_ingest(queue, clock, detector=detector)

    def silent_after(seconds: float, *hosts: str) -> list[str]:
        for _ in range(round(seconds * 10)):
            clock.now_s += 0.1
            for host_id in hosts:
                present = msgspec.structs.replace(report(host_id), sent_at=clock.now_s)
                ingest.accept(present, host_id=host_id, size_bytes=10)
            ingest.tick(clock.now_s)
        signals = [signal for item in queue.take(max_hosts=1000, timeout_s=0.0).signals for signal in item.signals]
        return [signal.body.host_id for signal in signals if isinstance(signal.body, HostSilent)]

    async def fail_to_read() -> None:
        def read() -> dict[str, float]:
            raise Unreachable("The database is away.", hint="wait")

        reading = asyncio.create_task(ingest.run_expectations(read))
        await detector.doubted.wait()
        reading.cancel()

    assert silent_after(10.0, "a", "b") == []
    assert silent_after(8.0, "a") == []
    asyncio.run(asyncio.wait_for(fail_to_read(), 30))
    assert silent_after(2.0, "a") == []
    assert silent_after(10.0, "a") == ["b"], "the database is asked again"


@pytest.mark.parametrize(
    "body",
    [
        encode(msgspec.structs.replace(report("b"), version=WIRE_VERSION + 1)),
        b'{"version":1,"workers":[{"rank":0,"step":9}],"sent_at":0.0}',
    ],
)
def test_a_report_of_another_release_is_refused_and_its_host_is_alive(body: bytes) -> None:
    clock, metrics = ManualClock(1_000_000.0), Metrics()
    queue = ReportQueue(max_items=1000, max_size_bytes=1_000_000)
    detector = FaultDetector(DetectorSettings())
    ingest = make_ingest(queue, clock, detector=detector, metrics=metrics)
    desk = ReportDesk(ingest, Authenticator("s" * 32), metrics)
    raised: dict[int, Signal] = {}
    detector.expect("b", clock.now_s, 0.0, clock.now_s)

    def let_pass(seconds: int, *, is_there: bool) -> None:
        for second in range(seconds):
            ingest.accept(msgspec.structs.replace(report("a"), sent_at=clock.now_s), host_id="a", size_bytes=10)
            if is_there and second % 2 == 0:  # a refused report is sent again after two seconds
                assert desk.answer(body, "b", []).startswith(b"HTTP/1.1 400 ")
            for _ in range(10):
                clock.now_s += 0.1
                ingest.tick(clock.now_s)
            batch = queue.take(max_hosts=1000, timeout_s=0.0)
            assert not any(item.report and item.report.facts.host_id == "b" for item in batch.reports)
            raised.update({signal.seq: signal for item in batch.signals for signal in item.signals})

    let_pass(120, is_there=True)
    assert not raised
    assert ingest.vouches.age_s("b", clock.now_s) <= 2.0
    let_pass(120, is_there=False)
    assert [type(signal.body) for signal in raised.values()] == [HostSilent]
    let_pass(10, is_there=True)
    assert [type(signal.body) for signal in raised.values()] == [HostSilent, HostReturned]


def test_a_host_that_sends_too_much_is_refused_and_alive_and_its_quiet_neighbour_is_accepted() -> None:
    clock, metrics = ManualClock(1_000_000.0), Metrics()
    queue = ReportQueue(max_items=1000, max_size_bytes=64 << 20)
    ingest = make_ingest(queue, clock, metrics=metrics)
    desk = ReportDesk(ingest, Authenticator("s" * 32), metrics)
    stored: dict[str, int] = {"flood": 0, "quiet": 0}

    def send(host_id: str, seq: int, words: int, n_signals: int = 1) -> bytes:
        signals = tuple(
            Signal(host_id, "i", seq * 100 + n, clock.now_s, EngineRestarted("x" * words)) for n in range(n_signals)
        )
        message = msgspec.structs.replace(report(host_id), seq=seq, sent_at=clock.now_s, signals=signals)
        return desk.answer(encode(message), host_id, [])

    answers = []
    for seq in range(1, 601):  # for a minute
        clock.now_s += 0.1
        answers.append(send("flood", seq, 16_000, 50 if seq % 2 else 1))
        if seq % 10 == 0:
            assert send("quiet", seq, 100).startswith(b"HTTP/1.1 200")
        for item in queue.take(max_hosts=9, timeout_s=0.0).signals:
            stored[item.signals[0].source] += item.size_bytes
        ingest.tick(clock.now_s)
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429")]
    assert refused and all(b"retry-after: " in answer for answer in refused)
    assert metrics.registry.get_sample_value("flyball_reports_refused_total", {"reason": "host_quota"}) == len(refused)
    assert (256 << 10) * 60 <= stored["flood"] <= (256 << 10) * 70 + (1 << 20)
    assert stored["quiet"] > 60 * 100
    assert ingest.vouches.age_s("flood", clock.now_s) == 0.0, "a refused host is alive"
