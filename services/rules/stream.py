"""Ports between the loops and to the bus: the signal stream, wake-ups, the granted lease."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from flyball.contracts.reports.signals import Signal


class Cursor(msgspec.Struct, frozen=True):
    """A position in the signal stream. After a flush, the new stream has another `stream` name."""

    stream: str
    position: int


class Delivered(msgspec.Struct, frozen=True):
    """A signal, and the cursor behind it."""

    cursor: Cursor
    signal: Signal


class SignalBus(Protocol):
    """An ordered, at-least-once stream of signals. One conformance suite covers all implementations."""

    def publish(self, signals: Sequence[Signal]) -> None:
        """Append signals. Raises TooBusy if the stream is full, Unreachable if the bus is."""
        ...

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """The signals after a cursor; from the start for None or a cursor of another stream."""
        ...

    def trim(self, upto: Cursor) -> None:
        """Drop everything up to a cursor that is stored with its decisions."""
        ...


class Wakeup(Protocol):
    """Wakes up sleeping loops that may have work. Only a hint: every loop also polls."""

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        """Wake up waiters. `hosts`: the only hosts that it concerns; none: all."""
        ...

    def wait(self, topic: str, timeout_s: float) -> bool:
        """Block until notified or timed out; returns whether it was notified since the last wait."""
        ...


class LeaseGrant(msgspec.Struct, frozen=True):
    epoch: int
    valid_until_monotonic_s: float  # by the holder's clock: from before the request, less a margin
