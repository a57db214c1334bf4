"""Takes reports in: feeds the fault detector, queues them for the database, says what is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import InvalidMessage, TooBusy
from flyball.contracts.signals import Report, ReportReply, Signal, SignalBody
from flyball.contracts.wire import check_version
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.sensor.committed import CommittedPositions
from services.sensor.fault_detector import FaultDetector
from services.sensor.report_queue import Received, ReportQueue

log = structlog.get_logger()

RETRY_AFTER_S = 1.0
EXPECT_EVERY_S = 1.0  # how often to look which hosts should report, and whether they do so elsewhere


class Ingest:
    """One sensor. Everything here runs in one event loop, the detector too, which so needs no lock.

    A reply never acknowledges the signals of its own report: they may leave the daemon's spool only when `committed`
    says so, after the controller stored them with its decisions.
    """

    def __init__(
        self,
        *,
        sensor_id: str,
        incarnation: str,
        detector: FaultDetector,
        queue: ReportQueue,
        committed: CommittedPositions,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._source = f"sensor.{sensor_id}"
        self._incarnation = incarnation
        self._seq = 0
        self._detector = detector
        self._queue = queue
        self._committed = committed
        self._clock = clock
        self._metrics = metrics

    def expect_hosts(self, heard_at: Mapping[str, float]) -> None:
        """Hosts that have ranks, and when any sensor last heard of each (wall clock): one that reports to none of them
        is silent, also if it never did so here."""
        now_s, now = self._clock.monotonic_s(), self._clock.wall_s()
        for host_id, at in heard_at.items():
            self._detector.expect(host_id, now_s, now - at)

    def accept(self, report: Report, *, size_bytes: int) -> ReportReply:
        """Take one report. Raises InvalidMessage, or TooBusy when the queue is full: the daemon sends it again."""
        self._check(report)
        now_s = self._clock.monotonic_s()
        # A host whose report there is no room for is alive all the same.
        self._raise_signals(self._detector.observe(report, now_s), now_s)
        new = tuple(s for s in report.signals if not self._committed.is_committed(s.incarnation, s.seq))
        item = Received(
            report=report, signals=new, size_bytes=size_bytes, at=self._clock.wall_s(), at_monotonic_s=now_s
        )
        if not self._queue.offer(item):
            self._metrics.reports_refused.labels(reason="queue_full").inc()
            raise TooBusy(
                "The sensor's queue is full.", retry_after_s=RETRY_AFTER_S, hint="send the report again a little later"
            )
        self._metrics.reports_received.inc()
        self._metrics.report_queue_length.set(len(self._queue))
        for signal in new:
            self._committed.expect(signal.incarnation, signal.seq)
        return ReportReply(
            committed=self._committed.known({report.incarnation, *(s.incarnation for s in report.signals)})
        )

    async def run_expectations(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Go on expecting the hosts that `read` gives, see `expect_hosts`."""
        outage = Outage("expectations", self._clock)
        while True:
            wait_s = EXPECT_EVERY_S
            try:
                self.expect_hosts(await asyncio.to_thread(read))
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)

    async def run_detector(self, tick_s: float) -> None:
        """Let time pass for the detector. It learns from the spacing of the ticks how late this loop ran."""
        due_s = self._clock.monotonic_s()
        while True:
            due_s += tick_s
            await asyncio.sleep(max(0.0, due_s - self._clock.monotonic_s()))
            now_s = self._clock.monotonic_s()
            self._metrics.detector_lag_seconds.set(max(0.0, now_s - due_s))
            due_s = max(due_s, now_s - tick_s)
            self._raise_signals(self._detector.tick(now_s), now_s)

    def _check(self, report: Report) -> None:
        try:
            check_version(report.version)
            if any(signal.source != report.facts.host_id for signal in report.signals):
                raise InvalidMessage(
                    f"The report of {report.facts.host_id!r} carries another host's signals.",
                    hint="a daemon sends what it observed itself",
                )
        except InvalidMessage:
            self._metrics.reports_refused.labels(reason="invalid").inc()
            raise

    def _raise_signals(self, bodies: Sequence[SignalBody], now_s: float) -> None:
        if not bodies:
            return
        at = self._clock.wall_s()
        signals = []
        for body in bodies:
            self._seq += 1
            signals.append(Signal(source=self._source, incarnation=self._incarnation, seq=self._seq, at=at, body=body))
            log.info("detected", signal=str(body.__struct_config__.tag), body=str(body))
        self._queue.offer(Received(report=None, signals=tuple(signals), size_bytes=0, at=at, at_monotonic_s=now_s))
