"""The fault detector of one sensor: silent hosts and stalled ranks. Pure: no clock, no I/O.

It doubts itself first. Whoever drives it calls `tick` at least every `tick_interval_s`; when the calls come late, the
driver's loop was held up and reports may be waiting unread, so the time by which it was late does not count.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.signals import Report, SignalBody
from services.sensor.host_silence import SilenceSettings, SilenceWatch, Suspicion
from services.sensor.rank_stalls import StallSettings, StallWatch
from services.sensor.rules import PeerRules

__all__ = ["DetectorSettings", "FaultDetector", "Suspicion"]


class DetectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every number that the detector uses, with its unit."""

    tick_interval_s: float = 0.1  # how far apart the calls of tick() may be at most
    lag_fraction: float = 0.25  # of the shortest deadline: lateness up to this is not worth a correction
    silence: SilenceSettings = SilenceSettings()
    stalls: StallSettings = StallSettings()


class FaultDetector:
    """`now_s` is one machine's monotonic clock and never goes back. Not thread-safe: one loop feeds it."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._silence = SilenceWatch(settings.silence)
        self._stalls = StallWatch(settings.stalls)
        self._peers = PeerRules()
        self._called_s: float | None = None
        self._forgiven_s = 0.0

    def expect(self, host_id: str, now_s: float, heard_ago_s: float) -> None:
        """A host that has ranks and should report, and how long ago it did to any sensor. Said again and again, it
        keeps a host that reports elsewhere from being called silent here, and finds one that dies with its sensor."""
        self._silence.expect(host_id, self._own_time(now_s), heard_ago_s)

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """Take a report in; answers what it shows: a host that returned, ranks that stalled, peers out of reach."""
        time_s = self._own_time(now_s)
        signals, is_newest = self._silence.observe(report, time_s)
        if is_newest:
            signals += self._peers.observe(report)
            signals += self._stalls.observe(report, time_s)
        self._drop_forgotten()
        return signals

    def tick(self, now_s: float) -> list[SignalBody]:
        """Let time pass; answers the hosts that fell silent."""
        signals = self._silence.tick(self._own_time(now_s))
        self._drop_forgotten()
        return signals

    def suspicion(self) -> tuple[Suspicion, ...]:
        """Every host that is overdue as of the last call: yellow, then red."""
        return self._silence.suspicion((self._called_s or 0.0) - self._forgiven_s)

    @property
    def forgiven_s(self) -> float:
        """The time so far that did not count because the driver's loop was late."""
        return self._forgiven_s

    def _drop_forgotten(self) -> None:
        for host_id in self._silence.take_forgotten():
            self._peers.forget(host_id)
            self._stalls.forget(host_id)

    def _own_time(self, now_s: float) -> float:
        if self._called_s is not None:
            late_s = now_s - self._called_s - self._settings.tick_interval_s
            if late_s > self._settings.lag_fraction * self._settings.silence.min_deadline_s:
                self._forgiven_s += late_s
        self._called_s = now_s if self._called_s is None else max(now_s, self._called_s)
        return self._called_s - self._forgiven_s
