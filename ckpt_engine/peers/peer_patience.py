"""For how long a step waits for a peer that is in reach, and does not take it. Pure."""

from __future__ import annotations

_LEAST = 1 / 64  # of the full time; from there on there is one try


class PeerPatience:
    """Halved each time that a step waited in vain, and full again when the peer took one. So a peer that takes nothing
    for good costs all steps together less than twice what it costs the first, and from then on each a single try."""

    def __init__(self, full_s: float) -> None:
        self._full_s = full_s
        self.left_s = full_s

    @property
    def is_full(self) -> bool:
        return self.left_s == self._full_s

    def in_vain(self) -> None:
        """A step was given up, for which the peer was asked for `left_s`."""
        half_s = self.left_s / 2
        self.left_s = half_s if half_s > self._full_s * _LEAST else 0.0

    def refill(self) -> None:
        """The peer took a step, or is another process by now."""
        self.left_s = self._full_s
