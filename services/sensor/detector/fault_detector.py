"""The fault detector of one sensor: silent hosts and stalled ranks. Pure: no clock, no I/O.

It doubts itself first. Whoever drives it calls `tick` at least every `tick_interval_s`; when the calls come late, the
driver's loop was held up and reports may be waiting unread, so the time by which it was late does not count, and nobody
is called silent before the hosts have had as long, or `recover_s`, to try again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flyball.contracts.reports.signals import PeerUnreachable, Report, SignalBody
from services.sensor.detector.heard_hosts import SilenceSettings
from services.sensor.detector.host_silence import SilenceWatch, Suspicion
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_stalls import StallWatch
from services.sensor.detector.watched_job import LearnedJob

__all__ = ["DetectorSettings", "FaultDetector", "Suspicion"]


class DetectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every number that the detector uses, with its unit."""

    tick_interval_s: float = 0.1  # how far apart the calls of tick() may be at most
    lag_fraction: float = 0.25  # of the shortest deadline: lateness up to this is not worth a correction
    recover_s: float = 5.0  # daemons that got no answer from a sensor that stood still try again within that time
    silence: SilenceSettings = SilenceSettings()
    stalls: StallSettings = StallSettings()


class FaultDetector:
    """`now_s` is one machine's monotonic clock and never goes back. Not thread-safe: one loop feeds it."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._tick_interval_s = settings.tick_interval_s
        self._recover_s = settings.recover_s
        self._tolerated_s = settings.lag_fraction * settings.silence.min_deadline_s
        self._stalls = StallWatch(settings.stalls)
        self._silence = SilenceWatch(settings.silence, self._stalls)
        self._peers = PeerRules()
        self._called_s: float | None = None
        self._forgiven_s = 0.0

    def expect(self, host_id: str, now_s: float, heard_ago_s: float, heard_at: float = 0.0) -> None:
        """A host that has ranks and should report, and how long ago it did to any sensor: `heard_at`, by that sensor's
        wall clock. Said again and again, it keeps a host that reports elsewhere from being called silent here, and
        finds one that dies with its sensor."""
        self._silence.expect(host_id, self._own_time(now_s), heard_ago_s, heard_at)

    def doubt(self, now_s: float, for_s: float) -> None:
        """What is heard elsewhere cannot be known for now: nobody is called silent for so long."""
        self._silence.doubt(self._own_time(now_s) + for_s)

    def set_neighbours(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """host -> the hosts that can tell whether it lives, see `witnesses.neighbours`."""
        self._silence.set_neighbours(known)

    def set_hang_timeouts(self, known: Mapping[str, float]) -> None:
        """job -> after how many seconds without a move a rank is hung, of jobs that say so themselves."""
        self._stalls.set_hang_timeouts(known)

    def learned(self) -> dict[str, LearnedJob]:
        """job -> what a sensor that comes after this one need not learn anew."""
        return self._stalls.learned()

    def recall(self, known: Mapping[str, LearnedJob]) -> None:
        """job -> what an earlier sensor learned."""
        self._stalls.recall(known)

    def questions(self, host_id: str) -> tuple[str, ...]:
        """The hosts that this one is to be asked about with the reply to its report."""
        return self._silence.questions(host_id)

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """Take a report in; answers what it shows: a host that returned, ranks that stalled, peers out of reach."""
        time_s = self._own_time(now_s)
        signals, is_newest = self._silence.observe(report, time_s)
        if is_newest:
            signals += self._peers.observe(report)
            signals += self._stalls.observe(report, time_s)
        self._drop_forgotten()
        return signals

    def hear(self, host_id: str, now_s: float) -> list[SignalBody]:
        """A sign of life of a host, which tells nothing else; answers whether it returned."""
        signals = self._silence.hear(host_id, self._own_time(now_s))
        self._drop_forgotten()
        return signals

    def leave(self, host_id: str) -> None:
        """A host said goodbye. One that should have ranks is expected all the same."""
        self._silence.leave(host_id)
        self._drop_forgotten()

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
        if not self._silence.has_forgotten:
            return
        for host_id in self._silence.take_forgotten():
            self._peers.forget(host_id)
            self._stalls.forget(host_id)

    def _own_time(self, now_s: float) -> float:
        if self._called_s is not None:
            late_s = now_s - self._called_s - self._tick_interval_s
            if late_s > self._tolerated_s:
                self._forgiven_s += late_s
                self._silence.doubt(now_s - self._forgiven_s + min(late_s, self._recover_s))
        self._called_s = now_s if self._called_s is None else max(now_s, self._called_s)
        return self._called_s - self._forgiven_s


# --- unreachable peers -----------------------------------------------------------------------------------------------

# What the state in a report says beyond its signals: state is repeated in every report, a signal comes once per
# episode.


class PeerRules:
    """Turns the set of peers that an engine cannot reach into one PeerUnreachable per peer and episode."""

    def __init__(self) -> None:
        self._unreachable: dict[str, frozenset[str]] = {}

    def observe(self, report: Report) -> list[SignalBody]:
        """Signals for peers that this report is the first to name; nothing for those that its daemon names itself."""
        host_id = report.facts.host_id
        if not report.engine.unreachable_peers and host_id not in self._unreachable:
            return []  # as nearly always
        now = frozenset(report.engine.unreachable_peers) - {host_id}
        before = self._unreachable.get(host_id, frozenset())
        said = {signal.body.peer for signal in report.signals if isinstance(signal.body, PeerUnreachable)}
        if now:
            self._unreachable[host_id] = now
        else:
            self._unreachable.pop(host_id, None)
        return [
            PeerUnreachable(peer=peer, message=f"The engine of {host_id} lost {peer} and cannot connect to it again.")
            for peer in sorted(now - before - said)
        ]

    def __len__(self) -> int:
        return len(self._unreachable)

    def forget(self, host_id: str) -> None:
        """Drop what is remembered of a host."""
        self._unreachable.pop(host_id, None)
