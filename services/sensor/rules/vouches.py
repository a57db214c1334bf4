"""Tracks which hosts report to this sensor, and when each last did. Pure."""

from __future__ import annotations

import msgspec

FORGET_AFTER_S = 60.0
MAX_HOSTS = 20_000
_NEVER_S = float("inf")


class Vouch(msgspec.Struct, frozen=True):
    """ages_ms[i]: how long ago hosts[i] reported; `hosts` None: the same as last time."""

    ages_ms: list[int]
    hosts: list[str] | None


class Vouches:
    """`now_s` is a monotonic clock."""

    def __init__(self) -> None:
        self._reported_s: dict[str, float] = {}
        self._are_hosts_stored = True

    def note_report(self, host_id: str, now_s: float) -> None:
        """A host reported, or showed otherwise that it is alive."""
        if host_id not in self._reported_s:
            self._are_hosts_stored = False
            if len(self._reported_s) >= MAX_HOSTS:
                del self._reported_s[next(iter(self._reported_s))]
        self._reported_s[host_id] = now_s

    def leave(self, host_id: str) -> None:
        """A host will not report again."""
        if self._reported_s.pop(host_id, None) is not None:
            self._are_hosts_stored = False

    def age_s(self, host_id: str, now_s: float) -> float:
        """How long ago a host reported here."""
        return now_s - self._reported_s.get(host_id, -_NEVER_S)

    def take(self, now_s: float) -> Vouch:
        """Return the vouches to store now. The order of the hosts stays while they are the same."""
        gone = [host_id for host_id, at_s in self._reported_s.items() if now_s - at_s > FORGET_AFTER_S]
        for host_id in gone:
            del self._reported_s[host_id]
        ages_ms = [int(1000.0 * (now_s - at_s)) for at_s in self._reported_s.values()]
        hosts = list(self._reported_s) if gone or not self._are_hosts_stored else None
        self._are_hosts_stored = True
        return Vouch(ages_ms, hosts)

    def not_stored(self) -> None:
        """Call this if the vouch taken last could not be stored: the next one names its hosts again."""
        self._are_hosts_stored = False
