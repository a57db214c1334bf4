"""Which hosts stopped reporting. Pure: time comes in as an argument.

A host is yellow (suspect) well before it is red (silent). Red at its deadline needs a witness: another host, itself
heard of, whose engine cannot reach it either. Without one the sensor may be the one that is cut off, so it waits
longer, and longest when nobody at all is heard of.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

import msgspec

from flyball.contracts.signals import HostReturned, HostSilent, PeerUnreachable, Report, SignalBody


class SilenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a host counts as silent."""

    interval_factor: float = 3.0  # of the interval that the daemon says it reports at
    deviation_factor: float = 6.0  # of the spread of the observed gaps, above their median
    min_deadline_s: float = 0.6
    max_deadline_s: float = 30.0  # unless the daemon's own interval asks for more
    expected_deadline_s: float = 10.0  # for a host that this sensor has not heard of yet
    yellow_fraction: float = 0.5  # of the deadline
    unwitnessed_factor: float = 3.0  # times the deadline, when no witness names the host
    correlated_factor: float = 5.0  # times the deadline, when several hosts are known and none is heard of
    window: int = 32  # gaps remembered per host
    max_hosts: int = 20_000  # the one not heard of for longest makes room
    forget_after_s: float = 3600.0


class Suspicion(msgspec.Struct, frozen=True):
    """A host that is yellow or red. `witnesses` cannot reach it either."""

    host_id: str
    is_silent: bool  # red: reported as HostSilent
    silent_s: float
    deadline_s: float
    witnesses: tuple[str, ...]


class _Host:
    __slots__ = ("accused", "deadline_s", "gaps", "incarnation", "is_red", "last_seen_s", "sent_at")

    def __init__(self, last_seen_s: float, deadline_s: float, window: int) -> None:
        self.last_seen_s = last_seen_s
        self.deadline_s = deadline_s
        self.gaps: deque[float] = deque(maxlen=window)
        self.accused: frozenset[str] = frozenset()
        self.is_red = False
        self.incarnation = ""
        self.sent_at = 0.0


class SilenceWatch:
    """Inter-arrival statistics and accusations per host; a report costs O(window)."""

    def __init__(self, settings: SilenceSettings) -> None:
        self._settings = settings
        self._hosts: dict[str, _Host] = {}  # in the order of last_seen_s
        self._accusers: dict[str, set[str]] = {}
        self._next_scan_s = 0.0
        self._forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self._hosts)

    def expect(self, host_id: str, now_s: float, heard_ago_s: float) -> None:
        """A host that should report. That any sensor heard of it `heard_ago_s` ago counts like a report here, once that
        is clearly newer than the last one here."""
        host = self._hosts.get(host_id) or self._admit(host_id, now_s)
        if 0.0 <= heard_ago_s < 0.5 * (now_s - host.last_seen_s):
            host.last_seen_s = now_s - heard_ago_s
            host.is_red = False
            self._hosts[host_id] = self._hosts.pop(host_id)
            self._next_scan_s = min(self._next_scan_s, now_s)

    def observe(self, report: Report, now_s: float) -> tuple[list[SignalBody], bool]:
        """Signals, and whether this is its host's newest report (a repeated or late one is only a sign of life)."""
        host_id = report.facts.host_id
        signals: list[SignalBody] = []
        host = self._hosts.get(host_id)
        if host is None:
            host = self._admit(host_id, now_s)
        else:
            gap_s = max(0.0, now_s - host.last_seen_s)
            if host.is_red:
                signals.append(HostReturned(host_id=host_id, away_s=gap_s))
                host.is_red = False
            elif host.incarnation == report.incarnation:
                host.gaps.append(gap_s)
            self._hosts[host_id] = self._hosts.pop(host_id)
        is_newest = report.incarnation != host.incarnation or report.sent_at > host.sent_at
        host.last_seen_s = max(host.last_seen_s, now_s)
        if is_newest:
            host.incarnation, host.sent_at = report.incarnation, report.sent_at
            self._accuse(host_id, host, report)
        host.deadline_s = self._deadline_s(report.interval_s, host.gaps)
        self._next_scan_s = min(self._next_scan_s, now_s + self._settings.yellow_fraction * host.deadline_s)
        return signals, is_newest

    def tick(self, now_s: float) -> list[SignalBody]:
        """HostSilent for every host that turned red. Cheap while nobody can be overdue."""
        if now_s < self._next_scan_s:
            return []
        signals: list[SignalBody] = []
        settings = self._settings
        overdue = [(name, host) for name, host in self._hosts.items() if self._is_yellow(host, now_s)]
        yellow = {name for name, _ in overdue}
        for name, host in overdue:
            silent_s = now_s - host.last_seen_s
            if host.is_red:
                if silent_s > settings.forget_after_s:
                    self._forget(name)
                continue
            witnesses = self._witnesses(name, yellow)
            others_are_heard = len(self._hosts) > len(yellow)
            factor = (
                1.0
                if witnesses
                else settings.unwitnessed_factor
                if others_are_heard or len(self._hosts) == 1
                else settings.correlated_factor
            )
            if silent_s > factor * host.deadline_s:
                host.is_red = True
                signals.append(
                    HostSilent(
                        host_id=name, silent_s=silent_s, deadline_s=factor * host.deadline_s, witnesses=witnesses
                    )
                )
        self._next_scan_s = min(
            (
                max(now_s, host.last_seen_s + settings.yellow_fraction * host.deadline_s)
                for host in self._hosts.values()
                if not host.is_red
            ),
            default=now_s + settings.max_deadline_s,
        )
        return signals

    def take_forgotten(self) -> list[str]:
        """Hosts that were dropped since the last call, for whoever remembers something of them."""
        taken, self._forgotten = self._forgotten, []
        return taken

    def suspicion(self, now_s: float) -> tuple[Suspicion, ...]:
        """Every host that is yellow or red, by name."""
        overdue = {name: host for name, host in self._hosts.items() if host.is_red or self._is_yellow(host, now_s)}
        return tuple(
            Suspicion(
                host_id=name,
                is_silent=host.is_red,
                silent_s=now_s - host.last_seen_s,
                deadline_s=host.deadline_s,
                witnesses=self._witnesses(name, set(overdue)),
            )
            for name, host in sorted(overdue.items())
        )

    def _is_yellow(self, host: _Host, now_s: float) -> bool:
        return now_s - host.last_seen_s > self._settings.yellow_fraction * host.deadline_s

    def _witnesses(self, host_id: str, yellow: set[str]) -> tuple[str, ...]:
        return tuple(sorted(self._accusers.get(host_id, set()) - yellow))

    def _deadline_s(self, interval_s: float, gaps: deque[float]) -> float:
        settings = self._settings
        interval_s = min(max(interval_s, 0.0), settings.forget_after_s)
        adapted_s = 0.0
        if gaps:
            middle_s = median(gaps)
            adapted_s = middle_s + settings.deviation_factor * fmean(abs(gap - middle_s) for gap in gaps)
        stated_s = max(settings.interval_factor * interval_s, settings.min_deadline_s)
        return max(stated_s, min(adapted_s, settings.max_deadline_s))

    def _accuse(self, host_id: str, host: _Host, report: Report) -> None:
        named = {signal.body.peer for signal in report.signals if isinstance(signal.body, PeerUnreachable)}
        accused = frozenset(named.union(report.engine.unreachable_peers)) - {host_id}
        for peer in host.accused - accused:
            self._acquit(peer, host_id)
        for peer in accused - host.accused:
            self._accusers.setdefault(peer, set()).add(host_id)
        host.accused = accused

    def _acquit(self, peer: str, accuser: str) -> None:
        accusers = self._accusers[peer]
        accusers.discard(accuser)
        if not accusers:
            del self._accusers[peer]

    def _admit(self, host_id: str, now_s: float) -> _Host:
        if len(self._hosts) >= self._settings.max_hosts:
            self._forget(next(iter(self._hosts)))
        host = _Host(now_s, self._settings.expected_deadline_s, self._settings.window)
        self._hosts[host_id] = host
        self._next_scan_s = min(self._next_scan_s, now_s + self._settings.yellow_fraction * host.deadline_s)
        return host

    def _forget(self, host_id: str) -> None:
        host = self._hosts.pop(host_id)
        self._forgotten.append(host_id)
        for peer in host.accused:
            self._acquit(peer, host_id)
