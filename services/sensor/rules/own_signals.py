"""Keeps the signals that a sensor raised itself until the controller has committed them. Pure.

Nobody else has these signals, and the bus may lose everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from flyball.contracts.reports.signals import HostReturned, HostSilent, HostSuspect, Signal, SignalBody

MAX_KEPT = 50_000  # all hosts of a sensor may become silent, and return
SEND_AGAIN_S = 2.0  # an uncommitted signal; doubles each time up to the maximum
MAX_SEND_AGAIN_S = 300.0


class OwnSignals:
    """In the order in which they were raised. A host's newest signal supersedes earlier ones, but seqs have no gaps.
    So nothing is removed until there are too many; then those that still hold start a new incarnation."""

    def __init__(self, *, source: str, incarnation: str, max_kept: int = MAX_KEPT) -> None:
        self.source = source
        self._name = incarnation
        self._max_kept = max_kept
        self._rounds = 0
        self._kept: deque[Signal] = deque()
        self._next_seq = 1
        self._send_at_s = 0.0
        self._pause_s = SEND_AGAIN_S

    @property
    def incarnation(self) -> str:
        return self._name if not self._rounds else f"{self._name}-{self._rounds}"

    def raise_(self, bodies: Sequence[SignalBody], *, at: float, now_s: float) -> tuple[Signal, ...]:
        """Number and keep what was observed at `at` (wall clock); returns the signals to publish."""
        signals = tuple(self._numbered(body, at) for body in bodies)
        if not signals:
            return ()
        if not self._kept:
            self._pause_s = SEND_AGAIN_S
            self._send_at_s = now_s + self._pause_s
        self._kept.extend(signals)
        if len(self._kept) <= self._max_kept:
            return signals
        return self._begin_anew(now_s)

    def newest_seq(self) -> int:
        """Of the current incarnation; 0 before its first signal."""
        return self._next_seq - 1

    def committed(self, upto_seq: int) -> None:
        """Drop the committed signals of the current incarnation."""
        while self._kept and self._kept[0].seq <= upto_seq:
            self._kept.popleft()

    def due(self, now_s: float) -> tuple[Signal, ...]:
        """All kept signals, if they have waited for too long: publish them again, in order, under the same seqs."""
        if not self._kept or now_s < self._send_at_s:
            return ()
        self._pause_s = min(2.0 * self._pause_s, MAX_SEND_AGAIN_S)
        self._send_at_s = now_s + self._pause_s
        return tuple(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _numbered(self, body: SignalBody, at: float) -> Signal:
        signal = Signal(source=self.source, incarnation=self.incarnation, seq=self._next_seq, at=at, body=body)
        self._next_seq += 1
        return signal

    def _begin_anew(self, now_s: float) -> tuple[Signal, ...]:
        """Drop the superseded signals, then the oldest if there are still too many."""
        newest: dict[str, Signal] = {}
        others: list[Signal] = []
        for signal in self._kept:
            if isinstance(signal.body, HostSilent | HostSuspect | HostReturned):
                newest.pop(signal.body.host_id, None)
                newest[signal.body.host_id] = signal
            else:
                others.append(signal)
        holding = sorted((*newest.values(), *others), key=lambda signal: signal.seq)[-self._max_kept // 2 :]
        self._rounds += 1
        self._next_seq = 1
        self._kept = deque(
            msgspec.structs.replace(signal, incarnation=self.incarnation, seq=seq)
            for seq, signal in enumerate(holding, 1)
        )
        self._next_seq += len(self._kept)
        self._send_at_s = now_s + self._pause_s
        return tuple(self._kept)
