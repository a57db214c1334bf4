"""Of which hosts this sensor hears, and when it last did. Pure."""

from __future__ import annotations

import msgspec

FORGET_AFTER_S = 60.0
MAX_HOSTS = 20_000
_NEVER_S = float("inf")


class Told(msgspec.Struct, frozen=True):
    """ages_ms[i]: how long ago hosts[i] was heard of; `hosts` None: they are those of the last time."""

    ages_ms: list[int]
    hosts: list[str] | None


class Vouches:
    """`now_s` is a monotonic clock."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._is_told = True  # the present names of hosts

    def heard(self, host_id: str, now_s: float) -> None:
        """A host reported."""
        if host_id not in self._heard_s:
            self._is_told = False
            if len(self._heard_s) >= MAX_HOSTS:
                del self._heard_s[next(iter(self._heard_s))]
        self._heard_s[host_id] = now_s

    def left(self, host_id: str) -> None:
        """A host will not report again."""
        if self._heard_s.pop(host_id, None) is not None:
            self._is_told = False

    def age_s(self, host_id: str, now_s: float) -> float:
        """How long ago a host was heard of here."""
        return now_s - self._heard_s.get(host_id, -_NEVER_S)

    def tell(self, now_s: float) -> Told:
        """What is to be stored now. The order of the hosts stays as long as they are the same."""
        gone = [host_id for host_id, at_s in self._heard_s.items() if now_s - at_s > FORGET_AFTER_S]
        for host_id in gone:
            del self._heard_s[host_id]
        ages_ms = [int(1000.0 * (now_s - at_s)) for at_s in self._heard_s.values()]
        hosts = list(self._heard_s) if gone or not self._is_told else None
        self._is_told = True
        return Told(ages_ms, hosts)

    def not_told(self) -> None:
        """It could not be stored."""
        self._is_told = False
