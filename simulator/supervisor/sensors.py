"""The simulated sensors: real admission, detector and queue; only the writing to bus and database is replaced."""

from __future__ import annotations

from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.signals import Report, ReportReply, Signal
from services.runtime.outages import OUTAGES, Outage
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.detector.witnesses import neighbours
from services.sensor.reports.committed import CommittedPositions
from services.sensor.reports.ingest import BACKLOG_S, EXPECT_EVERY_S, Ingest
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.reports.report_writer import MAX_HOSTS
from services.sensor.rules.placed import given_in
from services.sensor.rules.step_log import StepSummary
from simulator.ports.status_store import MemoryStatusStore
from simulator.ports.stored_copies import stored_points
from simulator.supervisor.processes import TICK_S, WRITE_EVERY_S, Shared, SimulatedProcess
from simulator.world.events import MachineClock
from simulator.world.world import World


class Sensor(SimulatedProcess):
    """One sensor around the real admission, fault detector and queue."""

    def __init__(self, world: World, name: str, clock: MachineClock, shared: Shared) -> None:
        super().__init__(world, name, clock)
        self._memory, self._bus, self._wakeup = shared.memory, shared.bus, shared.wakeup
        self._metrics = shared.metrics

    def begin(self) -> None:
        self._detector = FaultDetector(DetectorSettings(tick_interval_s=TICK_S))
        self._status = MemoryStatusStore(self._memory)
        self._committed = CommittedPositions(self._status.committed, self.clock)
        self._queue = ReportQueue(max_items=10_000, max_size_bytes=2**26)
        self._ingest = Ingest(
            sensor_id=self.name,
            incarnation=f"{self.name}-{self.starts}",
            detector=self._detector,
            queue=self._queue,
            committed=self._committed,
            clock=self.clock,
            metrics=self._metrics,
        )
        self._signals: list[Signal] = []  # taken from the queue, not stored yet
        self._reports: list[tuple[Report, float]] = []
        self._steps: list[StepSummary] = []
        self._outage = Outage(self.name, self.clock)
        self._has_recalled = False
        self.sent_at: dict[str, float] = {}  # by host: when the newest report that arrived was sent
        self.every(self._tick)
        self.every(self._sync)
        self._written = self.every(self._write)

    def accept(self, report: Report, sent_at: float) -> ReportReply | None:
        """Process one report; None if it is refused. `sent_at`: in simulated time."""
        host_id = report.facts.host_id
        try:
            reply = self._ingest.accept(report, host_id=host_id, size_bytes=1000)
        except FlyballError:
            return None
        self.sent_at[host_id] = max(sent_at, self.sent_at.get(host_id, 0.0))
        if report.signals:
            self._written()
        return reply

    def _tick(self) -> float:
        self._ingest.tick(self.clock.monotonic_s())
        return TICK_S

    def _sync(self) -> float:
        """Exchange state with the database: expected hosts, neighbours, learned jobs, vouches."""
        vouch = self._ingest.vouches.take(self.clock.monotonic_s())
        try:
            expected = self._status.expected_hosts()
            self._ingest.expect_hosts(expected)
            self._detector.expect_no_others(expected.keys())
            self._ingest.know_stored(stored_points(self._memory))
            if plan := next((g.plan for g in reversed(self._memory.generations.values())), None):
                self._detector.set_neighbours(neighbours(plan.hosts, plan.peers))
                self._detector.set_placed({(plan.job, plan.generation): given_in(plan)})
            if not self._has_recalled:
                self._detector.recall(self._status.learned())
                self._has_recalled = True
            self._status.learn(self._detector.learned())
            name, at = f"sensor.{self.name}", self.clock.wall_s()
            self._status.vouch(sensor=name, at=at, ages_ms=vouch.ages_ms, hosts=vouch.hosts)
        except OUTAGES:
            self._ingest.vouches.not_stored()
            self._detector.doubt(self.clock.monotonic_s(), EXPECT_EVERY_S + BACKLOG_S)
        return EXPECT_EVERY_S

    def _write(self) -> float:
        """Write signals to the bus first, then the state."""
        if not (self._signals or self._reports or self._steps):
            batch = self._queue.take(max_hosts=MAX_HOSTS, timeout_s=0.0)
            self._signals = [signal for item in batch.signals for signal in item.signals]
            self._reports = [(item.report, item.at) for item in batch.reports if item.report is not None]
            self._steps = list(batch.steps)
        try:
            if self._signals:
                self._bus.publish(self._signals)
                self._signals = []
                self._wakeup.notify("signals")
            if self._reports or self._steps:
                self._status.record_reports(self._reports, self._steps)
                self._reports, self._steps = [], []
            if outstanding := self._committed.outstanding():
                self._committed.update(outstanding, self._status.committed(outstanding))
        except OUTAGES as error:
            return self._outage.pause_s(error)
        self._outage.ended()
        return WRITE_EVERY_S
