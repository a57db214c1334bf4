"""A fault detector that is fed by reports which a test makes."""

from __future__ import annotations

from collections.abc import Iterable

from flyball.contracts.reports.signals import Report, SignalBody
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector

TICK_S = 0.1


class DetectorRig:
    """A detector in simulated time. Each second it gets the reports that `reports` makes, and all that it tells is kept
    with the time."""

    def __init__(self, settings: DetectorSettings) -> None:
        self.detector = FaultDetector(settings)
        self.now = 100.0
        self.signals: list[tuple[float, SignalBody]] = []

    def reports(self) -> Iterable[Report]:
        raise NotImplementedError

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now = round(self.now + TICK_S, 6)
            if abs(self.now - round(self.now)) < 1e-6:
                for report in self.reports():
                    self.keep(self.detector.observe(report, self.now))
            self.keep(self.detector.tick(self.now))

    def keep(self, bodies: Iterable[SignalBody]) -> None:
        self.signals += [(self.now, body) for body in bodies]
