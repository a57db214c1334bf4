"""Which of several servers to ask: one and the same while it answers, the next one when it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from flyball.contracts.clock import Clock

GO_HOME_AFTER_S = 300.0  # to up to twice of it: after a failure, until the host's own server is tried again


class Endpoints:
    """The servers of one kind, as one host sees them. Hosts begin at different ones, so that these share the work, and
    go back to theirs some minutes after they left it: else the server that was restarted last had nobody."""

    def __init__(self, urls: Sequence[str], host_id: str, clock: Clock) -> None:
        number = int.from_bytes(hashlib.sha256(host_id.encode()).digest()[:8], "big")
        home = number % len(urls)
        self._urls = (*urls[home:], *urls[:home])
        self._clock = clock
        self._current = 0
        self._go_home_after_s = GO_HOME_AFTER_S * (1.0 + number % 1000 / 1000.0)
        self._go_home_at_s = 0.0

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    def in_order(self) -> tuple[str, ...]:
        """All of them once, the one to be asked first."""
        if self._current != 0 and self._clock.monotonic_s() >= self._go_home_at_s:
            self._current = 0
        return (*self._urls[self._current :], *self._urls[: self._current])

    def failed(self, url: str) -> None:
        """Ask the one behind it next time."""
        if url == self._urls[self._current]:
            if self._current == 0:
                self._go_home_at_s = self._clock.monotonic_s() + self._go_home_after_s
            self._current = (self._current + 1) % len(self._urls)
