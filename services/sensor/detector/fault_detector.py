"""The fault detector of one sensor: silent hosts and stalled ranks. Pure: no clock, no I/O.

It doubts itself first. Its driver calls `tick` at least every `tick_interval_s`. If a call is late, the driver's loop
was held up, and reports may be waiting unread. So that time does not count, and no host becomes silent for as long
afterwards, at most `_RECOVER_S`: hosts try again within that time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

import msgspec

from flyball.contracts.reports.signals import PeerUnreachable, Report, SignalBody
from services.sensor.detector.host_silence import SilenceWatch, Suspicion
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_stalls import StallWatch
from services.sensor.detector.shared_stands import JobStand
from services.sensor.detector.watched_host import SilenceSettings
from services.sensor.detector.watched_job import LearnedJob

__all__ = ["DetectorSettings", "FaultDetector", "Suspicion"]


_LAG_FRACTION = 0.25  # of the shortest deadline: no correction for calls that are later by less
_RECOVER_S = 5.0  # daemons whose sensor did not answer try again within this time


class DetectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The detector's settings."""

    tick_interval_s: float = 0.1  # the longest time between two calls of tick()
    silence: SilenceSettings = SilenceSettings()  # the table below
    stalls: StallSettings = StallSettings()  # the table below


class FaultDetector:
    """`now_s` is the monotonic clock of one machine. Not thread-safe: one loop feeds it."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._tick_interval_s = settings.tick_interval_s
        self._tolerated_s = _LAG_FRACTION * settings.silence.min_deadline_s
        self._stalls = StallWatch(settings.stalls)
        self._silence = SilenceWatch(settings.silence, self._stalls)
        self._peers = PeerRules()
        self.questions = self._silence.questions  # host -> the hosts to ask it about, in the reply to its report
        self._called_s: float | None = None
        self._forgiven_s = 0.0

    def expect(self, host_id: str, now_s: float, report_ago_s: float, reported_at: float = 0.0) -> None:
        """A host should report, and last did to any sensor `report_ago_s` ago, at `reported_at` by that sensor's wall
        clock. To be called regularly: a host that reports elsewhere does not become silent here, and one that dies with
        its sensor does."""
        self._silence.expect(host_id, self._own_time(now_s), report_ago_s, reported_at)

    def expect_no_others(self, expected: Set[str]) -> None:
        """All that are expected, after `expect` of each."""
        self._silence.expect_no_others(expected)
        self._drop_forgotten()

    def doubt(self, now_s: float, for_s: float) -> None:
        """Reports to other sensors are unknown for now: let no host become silent for that long."""
        self._silence.doubt(self._own_time(now_s) + for_s)

    def set_neighbours(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """host -> the hosts that can see whether it is alive, see `witnesses.neighbours`."""
        self._silence.set_neighbours(known)

    def set_hang_timeouts(self, known: Mapping[str, float]) -> None:
        """job -> seconds without progress after which a rank counts as hung, for jobs that set this."""
        self._stalls.set_hang_timeouts(known)

    def set_placed(self, known: Mapping[tuple[str, int], Mapping[str, Collection[int]]]) -> None:
        """(job, generation) -> host -> its ranks, also of hosts that report to other sensors."""
        self._stalls.set_placed(known)

    def learned(self) -> dict[str, LearnedJob]:
        """job -> what the next sensor need not learn again."""
        return self._stalls.learned()

    def recall(self, known: Mapping[str, LearnedJob]) -> None:
        """job -> what an earlier sensor learned."""
        self._stalls.recall(known)

    def stands(self) -> tuple[JobStand, ...]:
        """What to tell the other sensors of ranks that stand still, see `shared_stands`."""
        return self._stalls.stands()

    @property
    def has_ranks_elsewhere(self) -> bool:
        """Whether other sensors may have something to tell."""
        return self._stalls.has_ranks_elsewhere

    def hear(self, told: Mapping[str, Iterable[JobStand]], now_s: float) -> list[SignalBody]:
        """Take in what all other sensors tell now, by sensor; returns stalled ranks."""
        return self._stalls.hear(told, self._own_time(now_s))

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """Take in a report; returns what it shows: a host that returned, stalled ranks, unreachable peers."""
        time_s = self._own_time(now_s)
        signals, is_newest = self._silence.observe(report, time_s)
        if is_newest:
            if report.engine.unreachable_peers or report.facts.host_id in self._peers.unreachable:
                signals += self._peers.observe(report)
            signals += self._stalls.observe(report, time_s)
        if self._silence.has_forgotten:
            self._drop_forgotten()
        return signals

    def note_alive(self, host_id: str, now_s: float) -> list[SignalBody]:
        """A host is alive, and nothing else is known; returns whether it came back."""
        signals = self._silence.note_alive(host_id, self._own_time(now_s))
        self._drop_forgotten()
        return signals

    def leave(self, host_id: str) -> None:
        """A host announced its end. If it should have ranks, `expect` brings it back."""
        self._silence.leave(host_id)
        self._drop_forgotten()

    def tick(self, now_s: float) -> list[SignalBody]:
        """Let time pass; returns the hosts that became silent or suspect."""
        signals = self._silence.tick(self._own_time(now_s))
        self._drop_forgotten()
        return signals

    def suspicion(self) -> tuple[Suspicion, ...]:
        """Every host that was overdue, yellow or red, at the last call."""
        return self._silence.suspicion((self._called_s or 0.0) - self._forgiven_s)

    @property
    def forgiven_s(self) -> float:
        """How much time in all did not count because the driver's loop was late."""
        return self._forgiven_s

    def _drop_forgotten(self) -> None:
        if not self._silence.has_forgotten:
            return
        for host_id in self._silence.take_forgotten():
            self._peers.forget(host_id)
            self._stalls.forget(host_id)

    def _own_time(self, now_s: float) -> float:
        called_s = self._called_s
        if called_s is None or now_s > called_s:
            self._called_s = now_s
            late_s = now_s - called_s - self._tick_interval_s if called_s is not None else 0.0
            if late_s > self._tolerated_s:
                self._forgiven_s += late_s
                self._silence.doubt(now_s - self._forgiven_s + min(late_s, _RECOVER_S))
            called_s = now_s
        return called_s - self._forgiven_s


# --- unreachable peers -----------------------------------------------------------------------------------------------


class PeerRules:
    """Turns the unreachable peers, which every report repeats, into one PeerUnreachable per peer and episode."""

    def __init__(self) -> None:
        self.unreachable: dict[str, frozenset[str]] = {}  # by host; hosts that reach all their peers are not in it

    def observe(self, report: Report) -> list[SignalBody]:
        """Signals for peers that became unreachable, except those for which the report carries a signal itself."""
        host_id = report.facts.host_id
        now = frozenset(report.engine.unreachable_peers) - {host_id}
        before = self.unreachable.get(host_id, frozenset())
        reported = {signal.body.peer for signal in report.signals if isinstance(signal.body, PeerUnreachable)}
        if now:
            self.unreachable[host_id] = now
        else:
            self.unreachable.pop(host_id, None)
        return [
            PeerUnreachable(peer=peer, message=f"The engine of {host_id} lost {peer} and cannot reconnect.")
            for peer in sorted(now - before - reported)
        ]

    def __len__(self) -> int:
        return len(self.unreachable)

    def forget(self, host_id: str) -> None:
        """Drop a host."""
        self.unreachable.pop(host_id, None)
