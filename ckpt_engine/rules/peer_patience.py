"""How long a step waits for a peer that is reachable but does not take it. Pure."""

from __future__ import annotations

_LEAST = 1 / 64  # of the full time; below it a step gets a single try


class PeerPatience:
    """Halved after each step that waited in vain; full again when the peer takes one. So a peer that never takes
    anything delays all steps together by less than twice what it delays the first."""

    def __init__(self, full_s: float) -> None:
        self._full_s = full_s
        self.left_s = full_s

    @property
    def is_full(self) -> bool:
        return self.left_s == self._full_s

    def in_vain(self) -> None:
        """A step was given up after `left_s`."""
        half_s = self.left_s / 2
        self.left_s = half_s if half_s > self._full_s * _LEAST else 0.0

    def refill(self) -> None:
        """The peer took a step, or is a new process."""
        self.left_s = self._full_s
