"""The sensor's intake of reports, in the tests' own process."""

from __future__ import annotations

from support.clocks.manual import ManualClock

from services.runtime.telemetry import Metrics
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.reports.committed import CommittedPositions
from services.sensor.reports.ingest import Ingest
from services.sensor.reports.report_queue import ReportQueue


def make_ingest(queue: ReportQueue, clock: ManualClock, **parts: object) -> Ingest:
    """With a detector of its own, and nothing committed yet."""
    made = {
        "sensor_id": "s",
        "incarnation": "i1",
        "detector": FaultDetector(DetectorSettings()),
        "committed": CommittedPositions(lambda _: {}, clock),
        "metrics": Metrics(),
    }
    return Ingest(queue=queue, clock=clock, **made | parts)  # type: ignore[arg-type]  # as given
